"""The device table: its facts hang together, and a wrong file is refused with the reason."""

import json
import re

import pytest

from mla_var3.conf import devices
from mla_var3.conf.devices import device_spec, devices_path, load_devices
from mla_var3.errors import InvalidArgumentError, UnknownNameError

NAMES = set(json.loads(devices_path().read_text(encoding="utf-8")))
NOT_PRINTED = {"NVIDIA GB10"}
"""Devices whose 16-bit rate no source prints; it is derived."""


@pytest.fixture(autouse=True)
def no_user_table(monkeypatch):
    monkeypatch.delenv(devices.ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def table():
    return json.loads(devices_path().read_text(encoding="utf-8"))


@pytest.fixture
def use(tmp_path, monkeypatch):
    """Makes a table the user's own."""

    def use_table(content):
        path = tmp_path / f"table{len(list(tmp_path.iterdir()))}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv(devices.ENVIRONMENT_VARIABLE, str(path))
        return str(path)

    return use_table


def test_the_keys_of_the_specification_and_burst_rates_that_fall_back_to_the_peak():
    spec = device_spec("NVIDIA GeForce RTX 5090")
    assert spec.peak_rates("float16") == spec.peak_rates("bfloat16") == (209.5, 1792.0)
    assert (spec["sm_clock_MHz"], spec["mem_clock_MHz"]) == (2407, 14001)
    for spec, bits in ((device_spec("RTX 5090"), 512), (device_spec("H100"), 5120)):  # of the bus
        assert spec["mem_clock_MHz"] * 2 * bits / 8 / 1e3 == pytest.approx(spec.peak_gbps, rel=1e-3)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_facts_hang_together_and_have_a_source(name):
    spec = device_spec(name)
    if "sm_clock_MHz" in spec:  # otherwise the clock behind the peak is not known
        derived = spec.sm_count * spec["sm_clock_MHz"] * spec["tensor_flops_per_clock_per_sm"] / 1e6
        for dtype in ("bfloat16", "float16"):
            assert spec.peak_tflops(dtype) == pytest.approx(derived, rel=1e-3)
    major, minor = spec.compute_capability
    assert spec.target == f"sm_{major}{minor}"
    assert all(target.startswith(spec.target) for target in spec.targets)
    for burst, peak in zip(spec.burst_rates("bfloat16"), spec.peak_rates("bfloat16"), strict=True):
        assert 0 < burst <= peak
    # One KiB of shared memory per block belongs to the system.
    assert spec["shared_memory_per_block_KiB"] == spec["shared_memory_per_sm_KiB"] - 1
    # The datasheets print twice these figures for 2:4 sparse matrices.
    kind = spec.entry("peak_bfloat16_float32_tflops").kind
    assert kind == ("derived" if name in NOT_PRINTED else "dense")
    assert spec.origin == str(devices_path())
    for key, value in spec.values.items():
        assert value.kind in devices.KINDS and len(value.source) > 10
        assert re.fullmatch(r"\d{4}(-\d\d)?", value.date)
        assert value.kind == "measured" or not key.startswith(("burst", "steady"))
    h200, b200 = device_spec("H200"), device_spec("B200")
    assert h200.has_burst and h200.burst_rates("bfloat16") == (790.0, 4300.0)
    assert not b200.has_burst and b200.burst_rates("bfloat16") == b200.peak_rates("bfloat16")
    # A burst lasts milliseconds; the power limit decides what lasts.
    assert h200["steady_bfloat16_float32_tflops"] < h200.burst_tflops("bfloat16")


def test_aliases_and_how_to_add_an_unknown_device():
    assert device_spec(" nvidia  h200 ").name == "NVIDIA H200"
    assert device_spec("rtx  5090").name == "NVIDIA GeForce RTX 5090"
    with pytest.raises(UnknownNameError) as error:
        device_spec("NVIDIA H205")
    for part in ("did you mean 'NVIDIA H20' or 'NVIDIA H200'", str(devices_path()),
                 "HYPER_MLA_DEVICES", "peak_dram_bw_GBps", "compute_capability"):  # fmt: skip
        assert part in str(error.value)


def test_value_that_is_not_recorded_is_an_error():
    spec = device_spec("B200")
    with pytest.raises(UnknownNameError, match="unknown value of NVIDIA B200 'mem_clock_MHz'"):
        spec["mem_clock_MHz"]
    assert spec.get("mem_clock_MHz", 7.0) == 7.0
    with pytest.raises(InvalidArgumentError, match="^key: expected the name of a number"):
        spec["targets"]
    with pytest.raises(InvalidArgumentError, match="^dtype: .*got 'float8'"):
        spec.peak_tflops("float8")


def test_user_file_adds_and_replaces(table, use, caplog):
    mine = table["NVIDIA H200"] | {"aliases": ["my card"]}
    table["NVIDIA B200"]["sm_count"]["value"] = 140
    path = use({"NVIDIA Example": mine, "NVIDIA B200": table["NVIDIA B200"]})
    assert (device_spec("my card").name, device_spec("my card").origin) == ("NVIDIA Example", path)
    assert device_spec("B200").sm_count == 140
    assert f"NVIDIA B200: the entry of {path} replaces it" in caplog.text
    with pytest.raises(TypeError):
        device_spec("H200").values["sm_count"] = None
    load_devices().clear()  # a caller cannot change the table
    assert set(load_devices()) == NAMES | {"NVIDIA Example"}


def test_a_flat_entry_of_a_user_takes_the_rest_from_the_shipped_one(use):
    """The form of the specification: plain numbers, peaks only."""
    name = "NVIDIA GeForce RTX 5090"
    path = use({name: {"peak_dram_bw_GBps": 1600.0, "peak_bfloat16_float32_tflops": 200}})
    spec = device_spec("RTX 5090")
    assert spec.peak_rates("bfloat16") == (200.0, 1600.0) and spec.sm_count == 170
    entry = spec.entry("peak_dram_bw_GBps")
    assert (entry.kind, entry.source, spec.origin) == ("given", path, path)


def test_a_wrong_entry_names_device_and_key(use):
    for name, entry, message in (
        ("X", {"sm_count": 3}, "expected the keys .* none for peak"),
        ("NVIDIA H200", {"peak_dram_bw_GBps": -1}, "expected a positive number, got -1"),
        ("NVIDIA H200", {"peak_dram_bw": 1.0}, "did you mean 'peak_dram_bw_GBps'"),
        ("NVIDIA H200", {"sm_count": None}, "sm_count: expected a positive integer, got None"),
        ("NVIDIA H200", {"aliases": "H200"}, "aliases: expected a list of names"),
        ("NVIDIA H200", [1], "expected an object with one entry per key"),
        ("X", {"like": "NVIDIA H2"}, "like: expected a device above it, got 'NVIDIA H2'"),
    ):
        use({name: entry})
        with pytest.raises(InvalidArgumentError, match=f": {name}: .*{message}"):
            load_devices()


def test_alias_of_two_devices_and_what_is_no_table_are_refused(table, use, monkeypatch):
    use({"NVIDIA Example": table["NVIDIA H200"]})
    with pytest.raises(InvalidArgumentError, match="NVIDIA Example: aliases: .*'H200', which is"):
        load_devices()
    for content in ("{", "[]", "{}", "3"):
        with pytest.raises(InvalidArgumentError, match=r"table\d.json: expected"):
            load_devices(use(content))
    monkeypatch.setenv(devices.ENVIRONMENT_VARIABLE, "none.json")
    with pytest.raises(InvalidArgumentError, match=r"none.json: expected a readable device table"):
        load_devices()


@pytest.mark.parametrize(
    ("key", "field", "value", "message"),
    [
        ("sm_count", "value", 0, "sm_count: value: expected a positive integer, got 0"),
        ("sm_count", "value", 132.5, "sm_count: value: expected a positive integer"),
        ("sm_count", "value", True, "sm_count: value: expected a positive integer, got True"),
        ("peak_dram_bw_GBps", "value", "4800", "value: expected a positive number, got '4800'"),
        ("peak_dram_bw_GBps", "unit", "TB/s", "peak_dram_bw_GBps: unit: expected 'GB/s', got"),
        ("l2_cache_MiB", "kind", "guess", "kind: expected spec or dense or measured or derived"),
        ("l2_cache_MiB", "kind", ["spec"], "l2_cache_MiB: kind: expected spec or dense"),
        ("l2_cache_MiB", "source", " ", "l2_cache_MiB: source: expected the title"),
        ("l2_cache_MiB", "date", "last year", "date: expected YYYY, YYYY-MM or YYYY-MM-DD"),
        ("compute_capability", "value", 9.0, "value: expected a string such as"),
        ("targets", "value", ["90"], "targets: value: expected a list of GPU codes"),
        ("targets", "value", [], "targets: value: expected a list of GPU codes"),
        ("dram_GiB", "note", "x", "dram_GiB: expected value, unit, kind, source, date, got"),
    ],
)
def test_wrong_value_names_device_and_key(table, use, key, field, value, message):
    table["NVIDIA B200"][key][field] = value
    with pytest.raises(InvalidArgumentError) as error:
        load_devices(use(table))
    assert "NVIDIA B200: " in str(error.value) and message in str(error.value)
