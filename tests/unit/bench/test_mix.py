"""The suite `mix`, and the versions that answer another question than the others."""

from __future__ import annotations

import pytest

from mla_var3.bench.suites import (
    PREFIX,
    PREFIX_SHAPE,
    comparable,
    mix_cases,
    mla_kernels,
    newest,
    select_kernels,
)

SPECIAL = ("mla_var6_plus_v5", "mla_var6_plus_v6")


def test_special_versions_take_part_only_by_name() -> None:
    kernels = mla_kernels()
    special = [k for k in kernels if k.language == "cute-dsl" and k.full_name in SPECIAL]
    assert len(special) == 2
    for chosen in (
        comparable(kernels),
        newest(kernels),
        select_kernels(["all"], kernels),
        select_kernels(["latest"], kernels),
        select_kernels(["mla_var6_plus"], kernels),
    ):
        assert chosen and not set(chosen) & set(special)
    named = select_kernels(["mla_var6_plus_v5"], kernels)
    assert {k.language for k in named} == {"cute-dsl"}
    # Their ids of old, where no other language has them.
    hopper = [k for k in kernels if k.language == "cute-dsl"]
    assert select_kernels(["mla_var6_plus_v2", "mla_var6_plus_v3"], hopper) == special


def test_every_shape_has_the_mix_and_both_pure_paths() -> None:
    *mixes, shared = mix_cases(mla_kernels(), ["fa3_qv", "fa3", "sdpa"])
    for case in mixes:
        names = [choice.kernel.full_name for choice in case.kernels]
        assert names[:3] == ["mla_var6_plus", "flash_mla", "flash_attention"]
        assert case.peers == ("fa3_qv", "fa3")
    with_8_bits = [c for c in mixes if c.kernels[-1].kernel.full_name == SPECIAL[0]]
    assert with_8_bits
    assert all(case.kernels[-1].fields == {"n": case.problem.t} for case in with_8_bits)
    assert (shared.problem.b, shared.problem.s, shared.problem.t, shared.problem.h) == PREFIX_SHAPE
    assert shared.kernels[0].fields == {"prefix": PREFIX}
    assert shared.peers == ("fa3_qv",)


@pytest.mark.parametrize("language", ["cutile-dsl"])
def test_without_the_language_only_peers_are_left(language: str) -> None:
    kernels = [kernel for kernel in mla_kernels() if kernel.language == language]
    assert all(not case.kernels for case in mix_cases(kernels, ["fa3_qv"]))
