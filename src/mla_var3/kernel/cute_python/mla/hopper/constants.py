"""Fixed sizes of the CuTe DSL kernels for Hopper: tiles, warp roles, registers."""

KV_BLOCK = 64
"""Tokens of a KV block: the page size of the caches in use, and two fit the shared memory of an SM
beside the query tile of the latent kernel."""
KV_BLOCK_BITS = KV_BLOCK.bit_length() - 1
"""A shift by so many divides by `KV_BLOCK`."""
ROWS = 64
"""Query rows of a tile: the M side of a wgmma."""
LATENT = 512
"""Latent width k of most models, and the widest of any."""
ROPE = 64
"""Rope width p of most models."""
HEAD = 128
"""Head width d of most models, of keys and of values."""
TILE = 64
"""Columns of a tile of 16-bit elements: 128 bytes, the widest swizzle of shared memory."""
TILE_BYTES = KV_BLOCK * TILE * 2
MMA_DEPTH = 16
"""K side of a wgmma with 16-bit operands."""

WARPGROUP = 128
"""Threads of a warpgroup."""
WARPGROUP_WARPS = WARPGROUP // 32
CONSUMER_WARPGROUPS = 2
CONSUMERS = CONSUMER_WARPGROUPS * WARPGROUP
"""Threads of the consumer warpgroups."""
CONSUMER_WARPS = CONSUMERS // 32
CONSUMER_WARP_BITS = CONSUMER_WARPS.bit_length() - 1
"""log2 of `CONSUMER_WARPS`."""
PRODUCER_WARP = CONSUMER_WARPS
"""The producer warp, the first behind the consumers. Registers are given to whole warpgroups, so it
has a warpgroup of its own, whose other warps idle."""
THREADS = CONSUMERS + WARPGROUP
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
"""Registers per thread after `setmaxnreg`. A CTA of 384 threads starts with 168 each, and both
numbers together use all of them: 2 * 232 + 40 = 3 * 168."""

MOST_CTAS = 144
"""Most CTAs of a launch of the latent kernel, one for each SM: as many as the largest chip of
compute capability 9.0."""
MOST_TAKEN = 256
"""Items of one CTA group where they are balanced, and their end (`latent/balance.py`)."""
RANGE_WORDS = 28 + MOST_TAKEN // 2
"""Words of a CTA in a schedule (`latent/schedule.py`)."""
SCHEDULE_SIZE = MOST_CTAS * RANGE_WORDS
"""Those of all CTAs."""
DEFAULT_SM_COUNT = 132
"""SMs assumed where no device is known."""
VECTOR_BITS = 128
"""What a thread reads or writes at once at most."""
SCORE_FLOOR = -1.0e30
"""Start of a running maximum; finite, so that no difference of infinities arises."""
LN_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
FP8_FORMATS = ("fp8_per_token", "fp8")
"""Formats of 8-bit caches (`op/mla/cache_formats.py`) that the latent kernel reads."""
