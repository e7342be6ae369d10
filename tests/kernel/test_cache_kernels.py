"""append_rows and reserve_pages in the interpreter: the states of a cache are those of torch."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_var3.attention.cache import index as launches
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.tokens import NewTokens
from mla_var3.errors import KernelCompileError
from mla_var3.kernel.cutile.mla import append_rows, reserve_pages
from mla_var3.op.mla.cache_formats import FORMATS, cache_format
from mla_var3.runtime import ct_kernel
from tests.programs import load_module

from .cache_steps import PAGE, PAGES, B, K, P, Steps, differing, make_cache

DTYPES = (torch.bfloat16, *FORMATS)
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120")
PAGED: dict[str, Any] = {"page_size": PAGE}


def by_kernel(*args: Any, **options: Any) -> LatentCache:
    """A cache that runs the kernels in the interpreter."""
    cache = make_cache(*args, **options)
    cache.index.kernels.serve(float8=True, fp8=True)
    assert cache.index.kernels.pages and cache.index.kernels.rows
    return cache


def pair(*args: Any, **options: Any) -> list[LatentCache]:
    return [make_cache(*args, **options), by_kernel(*args, **options)]


def pages_only(**options: Any) -> list[LatentCache]:
    """A pair whose rows torch writes: the interpreter takes nearly all of its time for them."""
    caches = pair(**PAGED, **options)
    caches[1].index.kernels.rows = False
    return caches


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((dtype, PAGED) for dtype in DTYPES),
        (torch.bfloat16, {}),
        ("fp8_per_token", {}),
        (torch.bfloat16, {**PAGED, "window": 12, "prefix": PAGE}),
        (torch.bfloat16, {**PAGED, "num_pages": 3}),
    ],
)
def test_every_step_gives_the_state_of_torch(dtype, options):
    caches = pair(dtype, **options)
    steps = Steps(caches, seed=5, forks=True)
    steps.run(30 if dtype in FORMATS and options else 60)  # pages are the same in all dtypes
    kernels = {key[0] for key in caches[1].index.kernels._launched}
    wanted = {reserve_pages.reserve_pages, reserve_pages.release_pages, append_rows.append_rows}
    assert kernels == wanted | ({reserve_pages.copy_pages} if options else set())
    assert not caches[0].index.kernels._launched
    assert steps.seen["refused"] > 1 and steps.seen["fork"] > 3 and steps.seen["truncate"] > 5


def test_without_forks_no_page_is_copied():
    caches = pages_only()
    Steps(caches, seed=6, forks=False).run(40)
    kernels = {key[0] for key in caches[1].index.kernels._launched}
    assert kernels == {reserve_pages.reserve_pages, reserve_pages.release_pages}


def test_dropping_and_appending_as_many_gives_the_same_pages():
    cache = by_kernel(**PAGED)
    rows, counts = [torch.zeros(B, 70, x).bfloat16() for x in (K, P)], [70, 1, 10, 0, 64]
    cache.append(*rows, [70, 1, 70, 0, 64])
    assert cache.pages is not None and int(cache.pages.free_count) == PAGES - 6
    table = cache.pages.block_table.clone()
    cache.truncate(counts)
    cache.append(*rows, counts)
    assert torch.equal(cache.pages.block_table, table)


@pytest.mark.parametrize("tile", [2, 4])
def test_more_pages_than_a_tile(tile, monkeypatch):
    """Evictions in several chunks, of pages with one owner and with several."""
    monkeypatch.setattr(reserve_pages, "TILE", tile)
    caches = pages_only(num_pages=20)
    # A tile of requests is not bounded by the one of pages here.
    monkeypatch.setattr(
        reserve_pages, "reserve_launch", in_steps_of_one(reserve_pages.reserve_launch)
    )
    Steps(caches, seed=7, forks=True).run(60)


def in_steps_of_one(make: Any) -> Any:
    def changed(*args: Any, **options: Any) -> ct_kernel.Launch:
        launch: ct_kernel.Launch = make(*args, **options)
        rows, _, _, *others = launch.constants
        return launch._replace(constants=(rows, 1, False, *others))

    return changed


MUTATIONS = {
    "later requests overtake": ("(total <= count)", "(need <= count)"),
    "a page too few": ("pages_of(new, PAGE) - held", "new // PAGE - held"),
    "lengths grow by what was asked": ("length + fits)", "length + asked)"),
    "no copy on write": ("ct.gather(owners, last) > 1", "ct.gather(owners, last) > 9"),
    "the other order on the stack": ("count + pushed - done - ranks", "count + done + ranks - 1"),
    "every owner pushes": ("(owned == marks)", "(owned <= 0)"),
    "a partial page is dropped": ("(tokens - 1) // PAGE + 1", "(tokens + 0) // PAGE"),
    "refused tokens stay": ("ct.scatter(refused, requests, 0, mask=gone)", "pass"),
}
WITHOUT_FORKS = {
    "refused pages are gone": ("count - ct.where(beyond, before, total)", "count - total"),
    "a refusal hides what was taken": ("refused_first | (~beyond", "(~beyond"),
}


@pytest.mark.parametrize("name", [*MUTATIONS, *WITHOUT_FORKS])
def test_planted_bugs_are_caught(name, tmp_path, monkeypatch):
    old, new = {**MUTATIONS, **WITHOUT_FORKS}[name]
    source = Path(reserve_pages.__file__).read_text()
    assert source.count(old) == 1
    path = tmp_path / "mutated.py"
    path.write_text(source.replace(old, new))
    module = load_module(path)
    for launch in ("reserve_launch", "release_launch", "copy_launch"):
        monkeypatch.setattr(reserve_pages, launch, getattr(module, launch))
    with pytest.raises(AssertionError, match="step"):
        Steps(pages_only(), seed=5, forks=name in MUTATIONS).run(60)


@pytest.mark.parametrize("options", [{}, PAGED])
def test_nothing_outside_the_arrays_is_touched(options, generator):
    """Whatever the device holds; the interpreter raises for an access out of bounds."""
    wild = torch.tensor([-(2**31), -1, 0, 1, 63, 64, 65, 255, 256, 257, 2**31 - 1])

    def garbage(*shape: int) -> torch.Tensor:
        return wild[torch.randint(0, len(wild), shape, generator=generator)].int()

    device = torch.device("cpu")
    cache = by_kernel(**options)
    cache.fork(0, into=[1])
    for turn in range(40):
        cache.lengths.copy_(garbage(B))
        if cache.pages is not None:
            for part in (cache.pages.block_table, cache.pages.free, cache.pages.free_count):
                part.copy_(garbage(*part.shape))
        packed = turn % 2 == 0
        rows = torch.ones(B, 7, K).bfloat16(), torch.ones(B, 7, P).bfloat16()
        flat = tuple(part.flatten(0, 1) for part in rows)
        tokens = NewTokens([("b", B), ("m", 7)], garbage(B), None, device)
        if packed:
            tokens = NewTokens([("total", 7 * B)], None, garbage(B + 1), device)
        cache.index.append(tokens, *flat)
        cache.index.drop(garbage(B) if turn % 3 else garbage(B) > 0)


def test_where_torch_serves(generator, monkeypatch, caplog):
    """Other sizes, a capture before the first launch, and kernels that do not compile."""
    assert append_rows.serves(512, 64) and append_rows.serves(512, 0)
    assert not append_rows.serves(96, 64) and not append_rows.serves(512, 48)
    assert append_rows.serves(512, 64, 65535) and not append_rows.serves(512, 64, 65536)
    assert reserve_pages.serves(1024, 2048) and not reserve_pages.serves(1025, 1)
    assert not reserve_pages.serves(1024, 2**20)
    kernels = make_cache("fp8").index.kernels
    assert not kernels.pages  # on the CPU
    kernels.serve(float8=False, fp8=True)
    assert kernels.pages and not kernels.rows  # on a device without float8

    rows = torch.randn(B, 2, K + P, generator=generator).bfloat16()
    new = rows[..., :K], rows[..., K:]
    cache, wanted = by_kernel("fp8", **PAGED), make_cache("fp8", **PAGED)
    wanted.append(*new)
    monkeypatch.setattr(launches, "capturing", lambda _: True)
    cache.append(*new)
    assert not cache.index.kernels._launched and not differing(cache, wanted)
    monkeypatch.setattr(launches, "capturing", lambda _: False)
    cache.append(*new)
    launched = set(cache.index.kernels._launched)
    assert len(launched) == 2
    monkeypatch.setattr(launches, "capturing", lambda _: True)
    monkeypatch.setattr(type(cache.storage), "put", None)  # a launch that was made can be captured
    cache.append(*new)
    assert cache.index.kernels._launched == launched
    monkeypatch.undo()

    def fails(launch: ct_kernel.Launch) -> None:
        raise KernelCompileError("reserve_pages: no such target")

    monkeypatch.setattr(ct_kernel, "launch_kernel", fails)
    cache = by_kernel("fp8", **PAGED)
    cache.append(*new)
    assert not differing(cache, wanted) and "no such target; torch" in caplog.text


def written(rows: torch.Tensor, dtype: str, scale: float, *, kernel: bool) -> torch.Tensor:
    """The buffer of a cache of one request after appending rows `[m, K]`."""
    options = {"scale": scale} if dtype == "fp8" else {}
    cache = LatentCache.allocate(1, len(rows), k=K, p=P, dtype=dtype, **options)
    if kernel:
        cache.index.kernels.serve(float8=True, fp8=True)
    cache.append(rows[None], rows[None, :, :P])
    assert bool(cache.index.kernels._launched) is kernel
    return cache.buffer


def assert_as_torch(rows: torch.Tensor, dtype: str, scale: float = 1.0) -> None:
    rows = rows.bfloat16()
    assert torch.equal(*(written(rows, dtype, scale, kernel=kernel) for kernel in (False, True)))


@pytest.mark.parametrize("dtype", ["fp8_per_token", "fp8_ds_mla"])
def test_numbers_are_rounded_as_after_a_division(dtype):
    """Every peak, up to a power of two, with every number that it does not make zero."""
    group = 128
    mantissas = 1 + torch.arange(128) / 128
    numbers = (mantissas * 2.0 ** -torch.arange(20)[:, None]).flatten()
    numbers = torch.cat([numbers, torch.zeros(-len(numbers) % (group - 1))])
    numbers = (numbers * (-1) ** torch.arange(len(numbers))).view(-1, group - 1)
    rows = [
        torch.cat([numbers.clamp(-peak, peak), peak.expand(len(numbers), 1)], 1)
        for peak in mantissas
    ]
    assert_as_torch(torch.cat(rows).view(-1, K), dtype)


@pytest.mark.parametrize("dtype", ["fp8_per_token", "fp8_ds_mla"])
def test_rows_of_any_size(dtype, generator):
    """Every exponent of a peak, subnormal ones too, beside infinities, NaN and zeros."""
    exponents = torch.arange(-133, 128).double()[:, None]
    rows = (torch.rand(len(exponents), K, generator=generator) * 2 - 1) * 2**exponents
    rows = torch.cat([rows, rows * 2.0 ** -torch.arange(K)])
    odd = rows.clone()
    odd[::3, 7::20], odd[1::3, 3], odd[2::3, 9] = torch.inf, -torch.inf, torch.nan
    odd[::4, :128] = 0
    assert_as_torch(torch.cat([rows, odd]), dtype)


def test_rope_over_any_scale(generator):
    """Keys far above and below the latent row, whose peak is any number, or zero."""
    m = 1024
    exponents = torch.randint(-60, 60, (m,), generator=generator)
    peaks = (1 + torch.arange(m) % 128 / 128) * 2.0**exponents
    peaks[::50] = 0
    latent = peaks[:, None].expand(m, K).bfloat16()
    bits = torch.randint(-(2**15), 2**15, (m, P), generator=generator)
    rope = bits.short().view(torch.bfloat16)
    bound = peaks[:, None] * 2.0 ** torch.randint(-140, 70, (m, P), generator=generator)
    near = (torch.rand(m, P, generator=generator).double() * bound).bfloat16()
    rope = torch.where(torch.arange(m)[:, None] % 4 == 0, rope, near)
    buffers = []
    for kernel in (False, True):
        cache = LatentCache.allocate(1, m, k=K, p=P, dtype="fp8_per_token")
        if kernel:
            cache.index.kernels.serve(float8=True, fp8=True)
        cache.append(latent[None], rope[None])
        buffers.append(cache.buffer)
    assert torch.equal(*buffers)


SCALES = [1.0, 0.1, 1 / 3, 1 - 2.0**-24, 2.0**-100, 2.0**100, 1e-40, (2 - 2.0**-23) * 2.0**90]


@pytest.mark.parametrize("scale", SCALES)
def test_all_numbers_with_a_given_scale(scale):
    """Also where all bits of the scale are set, and where it is far from 1."""
    numbers = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    numbers = torch.where(numbers.isnan(), 0, numbers)
    assert_as_torch(numbers.view(-1, K), "fp8", scale)


def test_other_tiles(monkeypatch):
    """Of more rows, and more of them than a dimension of the grid has."""
    monkeypatch.setattr(append_rows, "ROWS", 8)
    monkeypatch.setattr(append_rows, "MOST_CTAS", B)
    for options in ({}, PAGED):
        Steps(pair("fp8_per_token", **options), seed=8, forks=False).run(12)


def test_models_without_rope(generator):
    rows = torch.randn(2, 3, K, generator=generator).bfloat16()
    cache = LatentCache.allocate(2, 64, k=K, p=0)
    cache.index.kernels.serve(float8=True, fp8=False)
    cache.append(rows, rows[..., :0], [3, 1])
    assert cache.index.kernels._launched
    assert torch.equal(cache.buffer[0, :3], rows[0])
    assert torch.equal(cache.buffer[1, 0], rows[1, 0]) and not cache.buffer[1, 1:].any()


def test_rows_are_read_early_only_behind_the_own_kernel(monkeypatch):
    """What computed the rows may still run where another kernel is in front."""
    launched = []

    def launch(launch: ct_kernel.Launch) -> None:
        launched.append((launch.kernel, launch.early))

    monkeypatch.setattr(ct_kernel, "launch_kernel", launch)
    cache, rows = by_kernel(**PAGED), [torch.zeros(B, 2, x).bfloat16() for x in (K, P)]
    writing, reserving = append_rows.append_rows, reserve_pages.reserve_pages
    for early, pages in ((False, True), (True, True), (True, False)):
        cache.index.kernels.early, cache.index.kernels.pages = early, pages
        cache.append(*rows)
    own = [(reserving, False), (writing, False), (reserving, False), (writing, True)]
    assert launched == [*own, (writing, False)]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_they_compile(target):
    """With pages of more bytes than 32 bits count.

    Pages are released by number or by mask, each for two targets: it takes the longest by far.
    """

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    b, k, p, pages = 64, 512, 64, 1 << 18
    pool = reserve_pages.Pool(empty(b, 128), empty(pages), empty(pages), empty(1), PAGE)
    lengths, refused, taken, sources = (empty(b) for _ in range(4))
    mask, bounds = empty(b, dtype=torch.int8), empty(b + 1, dtype=torch.int64)
    dropped, kept = ((empty(b), 0), (mask, 64))[TARGETS.index(target) % 2]
    sizes = {"most": 4, "slots": 8192}
    plain = empty(pages, PAGE, k + p, dtype=torch.bfloat16)
    reserve, release = reserve_pages.reserve_launch, reserve_pages.release_launch
    made = [
        reserve(lengths, refused, empty(b), pool, taken, None, **sizes),
        reserve(lengths, refused, bounds, pool, taken, sources, **sizes),
        reserve(lengths, refused, None, None, taken, None, **sizes),
        release(lengths, refused, dropped, pool, kept),
        release(lengths, refused, mask, None, 0),
        reserve_pages.copy_launch(plain, sources, taken, lengths, pool),
    ]
    rows = empty(16, k + p, dtype=torch.bfloat16)
    new = rows[:, :k], rows[:, k:], taken, lengths
    for own in (None, bounds):
        out = plain[..., :k], plain[..., k:], None, None
        made.append(append_rows.append_launch(*new, own, pool.block_table, *out))
    for name in FORMATS if target != "sm_80" else ():
        fmt = cache_format(name)
        buffer = empty(pages, PAGE, fmt.row_bytes(k, p), dtype=torch.uint8)
        parts = fmt.parts(buffer, k, p)
        out8 = parts.latent, parts.rope, parts.scales, fmt
        made.append(append_rows.append_launch(*new, None, pool.block_table, *out8))
    for launch in made:
        signature = ct_kernel.signature_of(launch.kernel, launch.args)
        assert ct_kernel._export(launch.kernel, signature, target, "cubin")


def test_a_cache_on_another_device_than_the_current_one(monkeypatch):
    current, launched = [0], []

    @contextmanager
    def device(wanted):
        current.append(wanted.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(launches, "capturing", lambda _: False)
    monkeypatch.setattr(ct_kernel, "launch_kernel", lambda launch: launched.append(current[-1]))
    operand = SimpleNamespace(device=torch.device("cuda", 1))
    launch = SimpleNamespace(kernel="append_rows", constants=(), operands=(operand,))
    assert make_cache().index.kernels._launch(launch)
    assert launched == [1] and current == [0]
