"""The grammar of compression=, and the errors of what does not follow it."""

from __future__ import annotations

import pytest

from pycomm import ConfigError, compression
from pycomm.compression import CODECS, WRAPPERS, Compressor, parse
from pycomm.compression.spec import ALIASES


@pytest.mark.parametrize("name", CODECS.names())
def test_every_codec_is_a_function_and_its_spec_makes_it_again(name: str) -> None:
    made = getattr(compression, name)()
    assert isinstance(made, Compressor)
    assert made.name == name
    assert parse(made.spec).spec == made.spec


@pytest.mark.parametrize("name", WRAPPERS.names())
def test_every_wrapper_is_a_function_and_its_spec_makes_it_again(name: str) -> None:
    made = getattr(compression, name)(compression.topk(0.5))
    assert made.name == name
    assert parse(made.spec).spec == made.spec


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_is_known(alias: str) -> None:
    spec = alias if ALIASES[alias][0] in CODECS.names() else f"topk:0.5+{alias}"
    assert parse(parse(spec).spec).spec == parse(spec).spec


def test_text_dict_and_functions_say_the_same() -> None:
    made = compression.error_feedback(compression.topk(ratio=0.01))
    assert parse("topk:1%+ef").spec == made.spec
    assert parse("topk:ratio=0.01+error_feedback:classic").spec == made.spec
    assert parse({"topk": {"ratio": 0.01}, "ef": {}}).spec == made.spec
    assert parse(made) is made


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int9", "unknown compression 'int9'; known: .*cast.*int8"),
        ("quantize:int9", "unknown format 'int9'; known: .*int4, int8"),
        ("int8+nothing", "unknown compression wrapper 'nothing'; known: .*error_feedback.*ef21"),
        ("topk:ratio=0.1,0.2", "'0.2' has no name"),
        ("topk:share=0.1", "topk.*unexpected keyword argument 'share'"),
        ("int8:64", "name its arguments, as in 'int8:block_numel=64'"),
        ("int8:block_numel=33", "block_numel"),
        ("int8:rounding=up", "unknown rounding 'up'; known: nearest, stochastic"),
        ("qsgd:levels=200", "levels in 1..127"),
        ("qsgd:levels=true", "qsgd: levels: expected an integer from 1"),
        ("qsgd:block_numel=2.5", "qsgd: block_numel: expected an integer from 2"),
        ("powersgd:0", "powersgd: rank: expected an integer from 1"),
        ("int8+every:0", "every: the period, in calls: expected an integer from 1"),
        ("topk:0.1,tolerance=much", r"topk: expected a tolerance in \[0, 1\), got 'much'"),
        ("topk:0.1+dgc:m=1", r"momentum: expected m in \[0, 1\), got 1"),
        ("topk:0.1+dgc:warmup=1.5", "momentum: warmup, in calls: expected an integer from 0"),
        ("topk:0.1+dgc:start=0", r"momentum: start: expected a ratio in \(0, 1\]"),
        ("int8+policy:min_numel=-1", "policy: min_numel: expected an integer from 0"),
        ("int8+policy:min_dim=true", "policy: min_dim: expected an integer from 0"),
        ("int8+dgc", "around a sparse codec"),
        ("int8+every:2+ef", "swap the two"),
        ("int8+policy+every:2", "a policy chooses among compressors"),
        ("int8+ef:m=0.9", "expected no momentum in mode 'classic', got m=0.9"),
        ("int8+ef21:m=half", "expected a momentum m in"),
        ("int8+ef21:m=1.0", "expected a momentum m in"),
        ("int8+ef:ef22", "unknown mode 'ef22'; known: classic, ef21"),
        ("", "expected a text such as 'int8'"),
        (5, "expected a text such as 'int8'"),
        ({"topk": 0.1}, "expected {name: {argument: value}}"),
    ],
)
def test_mistakes_are_explained(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(spec)
