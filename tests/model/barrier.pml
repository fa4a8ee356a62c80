/* The flag protocol of csrc/shm (group.h: publish, meet, the two slots; wait.h: sleeping and waking; failures), for SPIN.
 *
 * RANKS ranks make CALLS collectives. Every one of them may be killed between any two steps (KILLS of them at most), or
 * run out of time (TIMEOUTS of them). Checked in every interleaving:
 *   - no lost wake-up and no blocked survivor: every rank ends, by having made all calls or by raising (a rank that can
 *     never move again is SPIN's "invalid end state");
 *   - a slot is not written again before all have read it (assert in meet);
 *   - nobody raises unless somebody died or ran out of time, and then names who did.
 *
 * Memory is that of a real machine: a rank's flag stays in its store buffer (`buffered`) until any later moment, so its load
 * of `sleepers` may overtake it. Locked instructions empty their own core's buffer, membarrier everybody's.
 *
 * A step is one access to what the ranks share. What a rank does in its own variables afterwards belongs to it: nobody sees
 * that, so it adds no interleaving, only states.
 *
 * The timer of a sleeping rank (wait.h: kNapNs) is what looks at the pidfds. Here it fires only when a rank has died, so
 * that it cannot hide a wake-up that was lost: those are found as if nobody ever woke by himself.
 *
 * BUG_... plant a mistake each; tests/model/test_model.py asserts that SPIN finds every one of them.
 */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef CALLS
#define CALLS 3
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0
#endif
#define NOBODY 255
#ifdef BUG_ONE_SLOT
#define SLOT(rank, call) (rank)
#define SLOTS RANKS
#else
#define SLOT(rank, call) (2 * (rank) + (call) % 2)
#define SLOTS 6 /* 2 * RANKS */
#endif

byte slot[SLOTS];     /* which call's message it holds */
byte seq[RANKS];      /* the flag, as all cores see it */
byte buffered[RANKS]; /* the flag, in its owner's store buffer; 0: empty */
byte sleepers;
byte awaits[RANKS];   /* 1 + rank slept for, or 0 */
bool is_rung[RANKS];  /* the futex word is not what its owner read before it lay down */
byte failure;         /* 0, or 1 + the culprit */
bool is_dead[RANKS];
bool is_gone[RANKS];  /* has left the group */
byte late = NOBODY;   /* who ran out of time */

#define SOMEBODY_IS_LOST ((is_dead[0] && !is_gone[0]) || (is_dead[1] && !is_gone[1]) || (is_dead[2] && !is_gone[2]))

inline drain(rank) { /* only inside atomic */
  if
  :: buffered[rank] != 0 -> seq[rank] = buffered[rank]; buffered[rank] = 0
  :: else
  fi
}

inline look(other) { /* only inside atomic */
  if
  :: awaits[other] != 0 && (awaits[other] == me + 1 || broken) -> drain(me); is_rung[other] = true
  :: else
  fi
}

/* Waiter::wake: one rank after the other, and what they await may change meanwhile. To ring is a locked instruction. */
inline wake() {
  broken = (failure != 0);
  atomic { look((me == 0 -> 1 : 0)) }
  atomic { look((me == 2 -> 1 : 2)); broken = false }
}

/* Waiter::declare: the first discovery stands, and who made it wakes everybody. */
inline declare(culprit) {
  atomic {
    drain(me);
    if :: failure == 0 -> failure = culprit + 1; is_first = true :: else fi
  }
  if
  :: is_first -> is_first = false; wake()
  :: else
  fi
}

/* Waiter::until: ends with the flag seen, or with `raised`. To spin is to be slow here: what matters is who lies down. */
inline await(peer) {
  do
  :: atomic { seq[peer] >= call -> break }
  :: atomic { seq[peer] < call -> is_rung[me] = false; awaits[me] = peer + 1 } /* lie_down: reads the bell, tells for whom */
     atomic { drain(me); sleepers++ }
#ifndef BUG_NO_BARRIER
     atomic { drain(0); drain(1); drain(2) } /* membarrier: every core's buffer */
#endif
     if /* doze: a last look, then a sleep that the bell ends */
#ifndef BUG_NO_LAST_LOOK
     :: seq[peer] >= call
#endif
#ifndef BUG_UNSEEN_FAILURE
     :: failure != 0
#endif
     :: else ->
        if
        :: is_rung[me]
        :: atomic { SOMEBODY_IS_LOST -> is_alarmed = true } /* the timer */
#if TIMEOUTS > 0
        :: atomic { late == NOBODY -> late = me }
#endif
        fi
     fi;
     atomic { drain(me); sleepers--; awaits[me] = 0 } /* get_up */
     if /* check, but what came meanwhile counts */
     :: atomic { seq[peer] >= call -> is_alarmed = false; break }
     :: seq[peer] < call ->
        if
        :: failure != 0
#ifndef BUG_UNCHECKED_DEATH
        :: atomic { failure == 0 && is_dead[0] && !is_gone[0] -> culprit = 0 } declare(culprit)
        :: atomic { failure == 0 && is_dead[1] && !is_gone[1] -> culprit = 1 } declare(culprit)
        :: atomic { failure == 0 && is_dead[2] && !is_gone[2] -> culprit = 2 } declare(culprit)
#endif
        :: failure == 0 && late == me -> declare(me)
        :: else
        fi;
        atomic {
          culprit = 0;
          if
          :: failure != 0 && seq[peer] < call -> raised = true; break
          :: else -> /* awake without a cause, or it died after all that was asked of it: look again */
             assert(!is_alarmed || failure != 0);
             is_alarmed = false
          fi
        }
     fi
  od
}

proctype Rank(byte me) {
  byte call = 1, peer, culprit;
  bool raised, broken, is_first, is_alarmed;
  {
    do
    :: atomic {
         call <= CALLS ->
         if /* Entry: a broken group takes no call */
         :: failure != 0 -> raised = true; break
         :: failure == 0
         fi
       }
       /* publish: the message, then the flag, into the store buffer; then a look at who sleeps, without a fence */
       atomic { drain(me); slot[SLOT(me, call)] = call; buffered[me] = call; peer = (me + 1) % RANKS }
#ifndef BUG_NO_WAKE
       if
       :: sleepers != 0 -> wake()
       :: sleepers == 0
       fi;
#endif
       /* meet: everybody's flag, then everybody's message */
       await(peer);
       atomic { if :: raised -> break :: else fi; peer = (me + 2) % RANKS }
       await(peer);
       if :: raised -> break :: else fi; /* no part of the next step: others move between flag and message */
       atomic {
         peer = 0;
         assert(slot[SLOT(0, call)] == call && slot[SLOT(1, call)] == call && slot[SLOT(2, call)] == call);
         call++
       }
    :: else -> break
    od;
    if
    :: raised -> assert(late == failure - 1 || is_dead[failure - 1])
    :: !raised -> atomic { drain(me); is_gone[me] = true }; wake() /* leave, which wakes too; */
    :: !raised                                                     /* or stay, and call nothing for a long time */
    fi
  } unless {
    is_dead[me]
  }
}

/* What the hardware does when it likes: a store buffer empties. */
active [RANKS] proctype Core() {
end:
  do
  :: atomic { buffered[_pid] != 0 -> drain(_pid) }
  od
}

/* Kills up to KILLS ranks, whichever and whenever. What a dead rank had stored still arrives. */
#define DIE(rank) atomic { is_dead[rank] = true; drain(rank) }
active proctype Killer() {
#if KILLS > 0
  if :: DIE(0) :: DIE(1) :: DIE(2) :: true fi;
#endif
#if KILLS > 1
  if :: DIE(0) :: DIE(1) :: DIE(2) :: true fi;
#endif
  skip
}

init {
  atomic { run Rank(0); run Rank(1); run Rank(2) }
}
