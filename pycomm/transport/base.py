"""The contract of a transport: point-to-point messages, and the collectives that it carries whole.

A transport joins the ranks of *one* group. It moves flat tensors: 1-D, contiguous, dense, without autograd, without
conjugate or negation bits, on a device in ``devices``. The layer above (``collectives``) makes them so.

[Note: transport contract]
- **Threads.** One thread at a time calls a transport; ``collectives`` sees to it. Handles may be waited on from any
  thread.
- **Buffers.** A buffer handed to ``isend`` is not written, one handed to ``irecv`` or to a collective neither read nor
  written, until the handle is done or the collective has returned. The handle keeps the tensor alive.
- **Order.** Messages between two ranks with the same tag arrive in the order they were sent. Sends to self work, once
  the receive has been posted or in any order with ``isend``.
- **Collectives** are called by every rank of the group in the same order. They block until the local result is
  complete.
- **Timeouts.** ``timeout_s`` bounds the wait of one call. A call that runs out raises ``CollectiveTimeoutError``. It
  does not cancel what already left: after it, the contents of the call's output are undefined and the group should be
  closed.
- **Failure.** No call blocks for ever after a failure: a dead peer raises ``PeerLostError`` on every rank that waits
  for it. A group that broke stays broken: later calls raise what broke it.
- **Agreement.** Ranks may disagree about what they call. Either the transport's own collectives compare it
  (``compares_calls``), or the layer above does, by ``exchange``, before it calls them.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, SupportsIndex

from ..errors import ConfigError
from ._kin import Kin
from ._wording import Failure, Place, forked

if TYPE_CHECKING:
    import torch

    from ..types import ReduceOp
    from ._patience import Look
    from ._tally import Message

    Exchange = Callable[[torch.Tensor, str, float | None], torch.Tensor]  # as Transport.exchange
    Meanwhile = Callable[[], None]  # what a rank does while frames are on their way
    MeanwhileOnHost = Callable[[Sequence[torch.Tensor]], None]
    ExchangeAmong = Callable[[torch.Tensor, str, float | None, Meanwhile | None], torch.Tensor]

__all__ = ["ANNOUNCEMENT_TAG", "FIRST_OWN_TAG", "FRAME_HEADER_BYTES", "Request", "Transport", "has_ended"]

# Tags of messages. Users have those below; from there on, two rounds of messages whose sizes the ranks have agreed on,
# which need not say them, announcements (mixed.py), four for plans (algorithms/executor.py), and two more. MPI promises
# no higher ones.
FIRST_OWN_TAG = 32759
ANNOUNCEMENT_TAG = FIRST_OWN_TAG + 2
_EXCHANGE_TAG = 32766

FRAME_HEADER_BYTES = 64  # of a frame of ``exchange_frames``; what follows is payload
FRAME_COMPARED_BYTES = 32  # of the header: alike on ranks that agree


class Request(ABC):
    """One message on its way. ``wait`` may be called more than once."""

    @abstractmethod
    def test(self) -> bool:
        """Moves the message forward if it can and says whether it is complete. Never blocks. Raises what ``wait``
        raises.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the message is complete, or raises ``CollectiveTimeoutError`` or ``PeerLostError``."""

    def settle(self) -> None:
        """For who knows that a message that was sent has arrived, by what its receiver answered: ends it as ``wait``
        does, or, where that costs anything, not at all.
        """
        self.wait()


def has_ended(request: Request) -> bool:
    """Says whether a message is complete or has failed, for one that is only kept: nobody is left to be told."""
    try:
        return request.test()
    except Exception:
        return True


class Transport(ABC):
    """Joins ``world_size`` ranks; see the note on top of this file.

    ``native`` names the collectives that the transport carries itself; for the others the executor runs a plan over
    ``isend`` and ``irecv``. ``supports`` narrows that by element type and operator.

    ``fast`` holds short cuts of some verbs: callables that take the *user's own* arguments (any object, not a flat
    tensor) and answer True if that was an ordinary tensor and the collective is done, False if nothing has happened
    yet and the ordinary path must serve (it also words the error). They are what a call of a few hundred nanoseconds
    is made of. Of messages ``send`` answers True and ``recv`` the source. ``isend`` and ``irecv`` take, behind those
    arguments, the class of handles that users get, which is derived from the transport's own, and the Group that such a
    handle asks; they answer one, whose errors say where they happened. So do those of ``start_`` and a verb, which make
    a call that nobody waits for; the next call does, and ``drain``.

    ``messages_are_free`` says that messages move by themselves, and that any thread may start one, at any time: also
    while another is inside a collective.

    ``scatters_in_place`` says that the output of its own reduce_scatter may be this rank's part of the input.

    ``takes_rows`` says that the whole buffer of its own all_gather and reduce_scatter may also be
    ``(world_size, numel)``, whose rows lie apart.

    ``sees_who_leaves`` says that no rank looks into the store in which they met for who has left.

    ``exchanges_parts`` says that what its own ``exchanger_among`` returns also takes frames shorter than was said, of
    other lengths on each rank.

    ``frame_bytes`` is the length of the frames that ``exchange_frames`` swaps; a multiple of 64. Equal on all ranks.

    ``segment_bytes`` is about what one message of a plan should carry: large enough that its start costs little beside
    it, small enough that the next is on its way while this one is added. Equal on all ranks.
    """

    name: ClassVar[str]
    segment_bytes: int = 1 << 20
    native: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset({"cpu"})
    fast: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    compares_calls: bool = False
    frame_bytes: int = 1024
    messages_are_free: bool = False
    scatters_in_place: bool = False
    sees_who_leaves: bool = False
    takes_rows: bool = False
    exchanges_parts: bool = False
    calls: int = 0  # collectives that the ranks have agreed on by ``exchange``
    group_name: str = "?"  # as errors call the group
    global_ranks: Sequence[int] = ()  # in the job, of the ranks that errors name; none: they are the same
    pid: int  # of the process that is this rank; a forked child is none
    rank: int
    world_size: int
    timeout_s: float
    _larger: weakref.ref[Transport] | None = None
    kin: Kin | None = None  # of this rank's transports that were made of one another

    def __new__(cls, *_arguments: object, **_named: object) -> Self:
        transport = super().__new__(cls)
        transport.pid = os.getpid()
        return transport

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise ConfigError(
            "a group cannot be copied or pickled, nor can what has one: it is this process's place among the ranks; "
            "copy the module that an engine wraps, or save a state_dict()"
        )

    def place(self, doing: str) -> Place:
        """Returns where an error of the call under way happens."""
        return Place(doing, self.calls, self.group_name, self.rank, self.world_size, self.global_ranks)

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the rank: all that it sees here is its parent's."""
        return self.pid != os.getpid()

    def check_not_forked(self, doing: str) -> None:
        """Raises TransportError in a forked child, which has none of the threads that its parent's calls rely on."""
        if self.is_inherited:
            raise forked(self.place(doing))

    # -- agreement and failure ----------------------------------------------------------------------------------------

    def can_agree(self, device_type: str) -> bool:
        """Whether the ranks can compare what they call on tensors of this kind of device, by ``exchange``."""
        return device_type == "cpu" and "cpu" in self.devices

    def exchange(self, frame: torch.Tensor, verb: str, timeout_s: float | None) -> torch.Tensor:
        """Returns every rank's ``frame (nbytes,)``, bytes in host memory, as ``(world_size, nbytes)``.

        All ranks pass equally many bytes, also where they disagree about everything else. ``verb`` words the errors.
        The next exchange may overwrite the result.
        Here: by messages.
        """
        return self._exchange_among(range(self.world_size), frame, verb, timeout_s, None)

    def _exchange_among(
        self,
        ranks: Sequence[int],
        frame: torch.Tensor,
        verb: str,
        timeout_s: float | None,
        meanwhile: Meanwhile | None,
    ) -> torch.Tensor:
        import torch

        frames = torch.empty((len(ranks), frame.numel()), dtype=torch.uint8, device="cpu")
        mine = ranks.index(self.rank)
        frames[mine] = frame
        places = [(mine + step) % len(ranks) for step in range(1, len(ranks))]
        requests = [self.irecv(frames[place], ranks[place], _EXCHANGE_TAG) for place in places]
        requests += [self.isend(frame, ranks[place], _EXCHANGE_TAG) for place in places]
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        if meanwhile is not None:
            meanwhile()
        for request in requests:
            request.wait(max(deadline - time.monotonic(), 1e-3))
        return frames

    def exchange_frames(
        self,
        frame: torch.Tensor,
        nbytes: int,
        verb: str,
        timeout_s: float | None,
        meanwhile: MeanwhileOnHost | None = None,
    ) -> Sequence[torch.Tensor]:
        """Returns every rank's ``frame (frame_bytes,)``, in rank order, of which ``nbytes``, that rank's own, are sent.

        What comes before each collective, and is each small one. Bytes 56 to 63 of a frame are the transport's own.
        A transport that knows the frames of this host's ranks before the others calls ``meanwhile`` with them.
        Otherwise as ``exchange``.
        """
        return self.exchange(frame, verb, timeout_s).unbind()

    def check_whole(self, doing: str) -> None:
        """Raises what broke the group, if that is known already, before memory is written that is being sent."""
        return None

    def check_given_up(self, doing: str) -> None:
        """Raises what broke the group in this call, if another rank says so: for one that has come late to it.

        It finds what the others sent before they gave up, and would be the only one for which the call succeeds. A
        transport whose ranks cannot come late to a broken call, as they are told before they send, has nothing to ask.
        """
        return None

    def check_lost(self, doing: str) -> None:
        """Raises PeerLostError if the process of a rank is seen to have ended: for one whose call cannot be explained
        by what the others called. It takes a moment.
        """
        return None

    def look_around(self) -> None:
        """Looks once, in a wait that is not of this group, at who of it lives; raises what broke it."""
        return None

    def look_also_at(self, larger: Transport) -> None:
        """Has long waits look at the ranks of ``larger``, too, of which those of this group do a part of the work. They
        may all wait for one another where one is lost that they do not see: one in a call, another in one that comes
        later, because it was told. Called once, before there is anything to wait for.
        """
        self._larger = weakref.ref(larger)  # which keeps this one

    def join_kin(self, kin: Kin, members: Sequence[int]) -> None:
        """Has long waits look whether who is waited for has gone on without a rank that is lost, see ``_kin.py``;
        ``members`` as ``Kin.add`` has them. Called once, before there is anything to wait for.
        """
        self.kin = kin
        kin.add(self, members)

    def leave(self) -> None:
        """Ends that: this rank leaves the group. Who waits for it in a group that is made of this one is told."""
        if self.kin is not None:
            self.kin.remove(self)

    def who_waits(self, *, at_once: bool = False) -> AbstractSet[int]:
        """Returns the ranks that make a group of this one, which is broken, and wait for this rank in that.

        Where that takes trips to a store, it looks now and then, or ``at_once``.
        """
        return frozenset()

    def tell_done(self) -> None:
        """Leaves word of what this rank has done in this group, for ``is_owed_by``."""
        return None

    def is_owed_by(self, rank: int, message: Message | None) -> bool:
        """Whether ``rank``, which is waited for and has left that word, has not done its part of the collective under
        way, or of ``message``.
        """
        return True

    def look_elsewhere(
        self, peer: int, has_come: Callable[[], bool] | None = None, message: Message | None = None
    ) -> None:
        """Looks once in a long wait, with arguments as ``Kin.look`` has them, at what else makes that vain, and raises
        it.
        """
        larger = None if self._larger is None else self._larger()
        if larger is not None:
            larger.look_around()
        if self.kin is not None:
            self.kin.look(self, peer, has_come, message)

    def is_part_of(self, ranks: Sequence[int], size: int) -> None:
        """Has errors call rank r of this group ``ranks[r]`` of ``size``, as a group does that this one is a part of and
        that hands its calls on; where errors of such a part are worded here.
        """
        return None

    def exchanger(self, nbytes: int) -> Exchange:
        """Returns what swaps frames of ``nbytes`` as ``exchange`` does, for many swaps beside large transfers.

        Called by every rank, at most once a group.
        """
        return self.exchange

    def exchanger_among(self, ranks: Sequence[int], nbytes: int) -> ExchangeAmong:
        """As ``exchanger``, for the frames of ``ranks``, each of which lists the same.

        Of what it returns, the last argument is called, if there is one, while the frames are on their way.
        """
        return partial(self._exchange_among, ranks)

    def record_on(self, log: Any) -> None:
        """Writes the group's calls on the board from now on, if the transport can; else the layer above does (see
        ``collectives/board.py``). ``log`` is a native BoardLog.
        """
        return None

    @property
    def failure(self) -> Failure | None:
        """What broke this group, as far as this rank knows; None while it is whole, and where nobody says more than
        ``is_broken``.
        """
        return None

    @property
    def is_broken(self) -> bool:
        """Whether a failure has ended this group for good, as far as this rank knows."""
        return self.failure is not None

    def abandon(self) -> None:
        """This rank leaves a call in the middle (Ctrl-C): the group is broken, here and for those that wait for it."""
        return None

    def drain(self, timeout_s: float) -> bool:
        """Waits for the calls that short cuts have started, however they end; returns False after ``timeout_s``."""
        return True

    def supports(self, verb: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        """Whether ``verb`` is carried whole for this element type and operator."""
        return verb in self.native

    @property
    def native_group(self) -> Any:
        """The native core's own group, which threads of the core may call without Python; None if there is none."""
        return None

    def native_all_reduce(self, flat: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float) -> tuple[Any, ...]:
        """Returns what the native core needs for an all_reduce of ``flat`` in place; only with a ``native_group``."""
        raise NotImplementedError

    # -- point to point -------------------------------------------------------------------------------------------

    @abstractmethod
    def isend(self, flat: torch.Tensor, peer: int, tag: int = 0) -> Request:
        """Starts sending ``flat (numel,)`` to rank ``peer``."""

    @abstractmethod
    def irecv(self, flat: torch.Tensor, peer: int | None, tag: int = 0) -> Request:
        """Starts receiving into ``flat (numel,)`` from rank ``peer``, or from any rank if None; the request then has
        ``source``.

        A message of another byte count than ``flat`` raises ``CollectiveMismatchError`` from the request, and no byte
        of it is written.
        """

    # -- collectives carried whole; called only if ``supports`` says so ----------------------------------------------

    def all_reduce(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        """``output (numel,)`` = reduction of every rank's ``input (numel,)``; the two may be the same tensor."""
        raise NotImplementedError

    def all_reduce_agreed(
        self,
        agree: Callable[[Meanwhile | None], object],
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        factor: float,
        timeout_s: float | None,
    ) -> None:
        """As ``all_reduce``, after the ranks have compared their calls, by ``agree(meanwhile)``.

        A transport whose ranks of a host agree first may pass it what they can begin without the others.
        """
        agree(None)
        self.all_reduce(output, input, op, factor, timeout_s)

    def reduce(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, root: int, timeout_s: float | None
    ) -> None:
        """As ``all_reduce``, the result on ``root`` alone; elsewhere ``output`` is not written."""
        raise NotImplementedError

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        """``output (numel,)`` = reduction of every rank's ``input (world_size * numel,)``, of which this rank keeps
        its part.
        """
        raise NotImplementedError

    def broadcast(self, flat: torch.Tensor, root: int, timeout_s: float | None) -> None:
        """``flat (numel,)`` becomes the root's."""
        raise NotImplementedError

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, timeout_s: float | None) -> None:
        """``output (world_size * numel,)`` = the ranks' ``input (numel,)`` in rank order."""
        raise NotImplementedError

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        timeout_s: float | None,
    ) -> None:
        """Part j of ``input`` (``input_splits[j]`` elements) goes to rank j; part i of ``output`` came from rank i."""
        raise NotImplementedError

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, root: int, timeout_s: float | None) -> None:
        """On ``root``, ``output (world_size * numel,)`` = the ranks' ``input (numel,)``; elsewhere ``output`` is
        None.
        """
        raise NotImplementedError

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, root: int, timeout_s: float | None) -> None:
        """``output (numel,)`` = this rank's part of the root's ``input (world_size * numel,)``; elsewhere ``input``
        is None.
        """
        raise NotImplementedError

    def barrier(self, timeout_s: float | None) -> None:
        """Returns once every rank has called it."""
        raise NotImplementedError

    # -- lifetime -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def split(
        self, ranks: Sequence[int] | None, key: int, *, with_all: bool = False, look: Look | None = None
    ) -> Transport | None:
        """A transport of the same kind joining ``ranks`` of this group, in that order; None on a rank that is not
        among them.

        Called by every rank of this group that is alive, members or not (those pass their own list, or None). ``key``,
        a positive int64, is the same on the new group's ranks and of no other group, so that a transport needs no
        exchange to name it. Those who live may call it on a group that is broken, or breaks meanwhile, unless
        ``with_all``: then nobody waits here for a rank that knows of that and does not come.

        A rank that does not know of the loss may come here for a group of ranks that live, while others, who do, wait
        for it in another one: it gets the error of the loss (``_crossings.py``). What waits for the members asks
        ``look``, too, which raises what else makes it vain.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives everything back. Never blocks on a peer, never raises; may be called twice."""
