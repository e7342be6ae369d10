"""The device table: its facts hang together, and a wrong file is refused with the reason."""

import copy
import json
import re

import pytest

from mla_var3.conf import devices
from mla_var3.conf.devices import device_spec, devices_path, load_devices
from mla_var3.errors import InvalidArgumentError, UnknownNameError

NAMES = {
    "NVIDIA GeForce RTX 5090",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H200",
    "NVIDIA B200",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
}


@pytest.fixture(autouse=True)
def no_user_table(monkeypatch):
    monkeypatch.delenv(devices.ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def table():
    return json.loads(devices_path().read_text(encoding="utf-8"))


@pytest.fixture
def write(tmp_path):
    def write_table(content):
        path = tmp_path / f"table{len(list(tmp_path.iterdir()))}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write_table


def test_the_five_devices_are_there():
    assert set(load_devices()) == NAMES


def test_keys_of_the_specification():
    spec = device_spec("NVIDIA GeForce RTX 5090")
    assert spec["peak_float16_float32_tflops"] == 209.5
    assert spec["peak_bfloat16_float32_tflops"] == 209.5
    assert spec["peak_dram_bw_GBps"] == 1792.0
    assert (spec["sm_clock_MHz"], spec["mem_clock_MHz"]) == (2407, 14001)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_peak_follows_from_clock_and_sms(name):
    spec = device_spec(name)
    derived = spec.sm_count * spec["sm_clock_MHz"] * spec["tensor_flops_per_clock_per_sm"] / 1e6
    for dtype in ("bfloat16", "float16"):
        assert spec.peak_tflops(dtype) == pytest.approx(derived, rel=1e-3)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_facts_hang_together(name):
    spec = device_spec(name)
    major, minor = spec.compute_capability
    assert spec.target == f"sm_{major}{minor}"
    assert all(target.startswith(spec.target) for target in spec.targets)
    for burst, peak in zip(spec.burst_rates("bfloat16"), spec.peak_rates("bfloat16"), strict=True):
        assert 0 < burst <= peak
    # One KiB of shared memory per block belongs to the system.
    assert spec["shared_memory_per_block_KiB"] == spec["shared_memory_per_sm_KiB"] - 1
    assert spec.shared_memory_per_block_bytes == spec["shared_memory_per_block_KiB"] * 1024
    assert spec["registers_per_sm"] == 65536
    assert spec.ridge_point() == pytest.approx(
        spec.peak_tflops("bfloat16") * 1e12 / (spec.peak_gbps * 1e9)
    )
    assert list(spec) == list(spec.values)


def test_memory_clock_gives_the_bandwidth_where_the_bus_is_known():
    for name, bits in (("RTX 5090", 512), ("H100", 5120)):
        spec = device_spec(name)
        assert spec["mem_clock_MHz"] * 2 * bits / 8 / 1e3 == pytest.approx(spec.peak_gbps, rel=1e-3)


def test_every_value_has_provenance():
    for spec in load_devices().values():
        assert spec.origin == str(devices_path())
        for key in spec:
            value = spec.entry(key)
            assert value.kind in devices.KINDS
            assert len(value.source) > 10
            assert re.fullmatch(r"\d{4}(-\d\d)?", value.date)
            if key.startswith(("burst", "steady")):
                assert value.kind == "measured"


def test_burst_falls_back_to_the_peak_and_says_so():
    h200, b200 = device_spec("H200"), device_spec("B200")
    assert h200.has_burst and h200.burst_rates("bfloat16") == (790.0, 4300.0)
    assert not b200.has_burst and b200.burst_rates("bfloat16") == b200.peak_rates("bfloat16")
    # A burst lasts milliseconds; the power limit decides what lasts.
    assert h200["steady_bfloat16_float32_tflops"] < h200.burst_tflops("bfloat16")


def test_the_older_name_of_a_burst_rate_is_read(table, write):
    entry = table["NVIDIA H200"]
    for key in [key for key in entry if key.startswith("burst")]:
        entry[key.replace("burst", "sustained")] = entry.pop(key)
    old = load_devices(write({"NVIDIA H200": entry}))["NVIDIA H200"]
    assert old.burst_rates("bfloat16") == device_spec("H200").burst_rates("bfloat16")


def test_a_flat_entry_of_a_user_takes_the_rest_from_the_shipped_one(write, monkeypatch):
    """The form of the specification: plain numbers, peaks only."""
    name = "NVIDIA GeForce RTX 5090"
    path = write({name: {"peak_dram_bw_GBps": 1600.0, "peak_bfloat16_float32_tflops": 200}})
    monkeypatch.setenv(devices.ENVIRONMENT_VARIABLE, str(path))
    spec = device_spec("RTX 5090")
    assert spec.peak_rates("bfloat16") == (200.0, 1600.0) and spec.sm_count == 170
    assert (spec.entry("peak_dram_bw_GBps").kind, spec.origin) == ("given", str(path))
    monkeypatch.setenv(devices.ENVIRONMENT_VARIABLE, str(write({"X": {"sm_count": 3}})))
    with pytest.raises(InvalidArgumentError, match="X: expected the keys .* none for peak"):
        load_devices()


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h200", "NVIDIA H200"),
        ("nvidia h200", "NVIDIA H200"),
        ("RTX 5090", "NVIDIA GeForce RTX 5090"),
        (" rtx  5090 ", "NVIDIA GeForce RTX 5090"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    ],
)
def test_aliases(alias, name):
    assert device_spec(alias).name == name


def test_unknown_device_says_how_to_add_it():
    with pytest.raises(UnknownNameError) as error:
        device_spec("NVIDIA H20")
    message = str(error.value)
    for part in (
        "unknown device 'NVIDIA H20'",
        "did you mean 'NVIDIA H200'",
        str(devices_path()),
        "HYPER_MLA_DEVICES",
        "peak_dram_bw_GBps",
        "compute_capability",
    ):
        assert part in message


def test_value_that_is_not_recorded_is_an_error():
    spec = device_spec("B200")
    assert "mem_clock_MHz" not in spec
    with pytest.raises(UnknownNameError, match="unknown value of NVIDIA B200 'mem_clock_MHz'"):
        spec["mem_clock_MHz"]
    assert spec.get("mem_clock_MHz", 7.0) == 7.0
    with pytest.raises(InvalidArgumentError, match="^key: expected the name of a number"):
        spec["targets"]
    with pytest.raises(InvalidArgumentError, match="^dtype: .*got 'float8'"):
        spec.peak_tflops("float8")


def test_spec_is_read_only():
    spec = device_spec("H200")
    with pytest.raises(AttributeError):
        spec.name = "other"
    with pytest.raises(TypeError):
        spec.values["sm_count"] = None


def test_loading_is_cached_but_the_result_is_the_callers():
    first = load_devices()
    first.clear()
    assert set(load_devices()) == NAMES
    assert load_devices()["NVIDIA H200"] is load_devices()["NVIDIA H200"]


def test_user_file_adds_and_replaces(table, write, monkeypatch, caplog):
    mine = copy.deepcopy(table["NVIDIA H200"])
    mine["aliases"] = ["my card"]
    replaced = copy.deepcopy(table["NVIDIA B200"])
    replaced["sm_count"]["value"] = 140
    path = write({"NVIDIA Example": mine, "NVIDIA B200": replaced})
    monkeypatch.setenv(devices.ENVIRONMENT_VARIABLE, str(path))
    assert device_spec("my card").name == "NVIDIA Example"
    assert device_spec("my card").origin == str(path)
    assert device_spec("B200").sm_count == 140
    assert f"NVIDIA B200: the entry of {path} replaces it" in caplog.text
    assert set(load_devices()) == NAMES | {"NVIDIA Example"}
    assert set(load_devices(path)) == {"NVIDIA Example", "NVIDIA B200"}


def test_a_flat_entry_replaces_single_values(write, monkeypatch):
    """The form of the specification: bare peaks, which predictions then follow."""
    shipped = device_spec("NVIDIA H200")
    path = write({"NVIDIA H200": {"peak_bfloat16_float32_tflops": 500.5}})
    monkeypatch.setenv(devices.ENVIRONMENT_VARIABLE, str(path))
    spec = device_spec("NVIDIA H200")
    assert spec.peak_tflops("bfloat16") == 500.5
    assert spec.entry("peak_bfloat16_float32_tflops").source == str(path)
    assert spec.sm_count == shipped.sm_count
    assert spec.burst_gbps == shipped.burst_gbps


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("NVIDIA New", {"peak_dram_bw_GBps": 1792.0}, "NVIDIA New: expected the keys"),
        ("NVIDIA H200", {"peak_dram_bw_GBps": -1}, "expected a positive number, got -1"),
        ("NVIDIA H200", {"peak_dram_bw": 1.0}, "did you mean 'peak_dram_bw_GBps'"),
    ],
)
def test_a_wrong_flat_entry_is_refused(write, monkeypatch, name, entry, message):
    monkeypatch.setenv(devices.ENVIRONMENT_VARIABLE, str(write({name: entry})))
    with pytest.raises(InvalidArgumentError, match=message):
        load_devices()


def test_alias_of_two_devices_is_refused(table, write, monkeypatch):
    path = write({"NVIDIA Example": table["NVIDIA H200"]})
    monkeypatch.setenv(devices.ENVIRONMENT_VARIABLE, str(path))
    with pytest.raises(InvalidArgumentError, match="NVIDIA Example: aliases: .*'H200', which is"):
        load_devices()


def test_missing_user_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(devices.ENVIRONMENT_VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(InvalidArgumentError, match=r"none.json: expected a readable device table"):
        load_devices()


@pytest.mark.parametrize("content", ["{", "[]", "{}", "3", '{"a": {}, "a": {}}'])
def test_not_a_table(content, write):
    with pytest.raises(InvalidArgumentError, match=r"table0.json: expected"):
        load_devices(write(content))


@pytest.mark.parametrize(
    ("key", "field", "value", "message"),
    [
        ("sm_count", "value", 0, "sm_count: value: expected a positive integer, got 0"),
        ("sm_count", "value", 132.5, "sm_count: value: expected a positive integer"),
        ("sm_count", "value", True, "sm_count: value: expected a positive integer, got True"),
        ("peak_dram_bw_GBps", "value", "4800", "value: expected a positive number, got '4800'"),
        ("peak_dram_bw_GBps", "value", -1, "value: expected a positive number, got -1"),
        ("peak_dram_bw_GBps", "unit", "TB/s", "peak_dram_bw_GBps: unit: expected 'GB/s', got"),
        ("l2_cache_MiB", "kind", "guess", "kind: expected spec or dense or measured or derived"),
        ("l2_cache_MiB", "source", " ", "l2_cache_MiB: source: expected the title"),
        ("l2_cache_MiB", "date", "last year", "date: expected YYYY, YYYY-MM or YYYY-MM-DD"),
        ("compute_capability", "value", 9.0, "value: expected a string such as"),
        ("targets", "value", ["90"], "targets: value: expected a list of GPU codes"),
        ("targets", "value", [], "targets: value: expected a list of GPU codes"),
        ("dram_GiB", "note", "x", "dram_GiB: expected value, unit, kind, source, date, got"),
    ],
)
def test_wrong_value_names_device_and_key(table, write, key, field, value, message):
    table["NVIDIA H200"][key][field] = value
    with pytest.raises(InvalidArgumentError) as error:
        load_devices(write(table))
    assert "NVIDIA H200: " in str(error.value)
    assert message in str(error.value)


def test_wrong_structure_names_device_and_key(table, write):
    def refused(entry):
        with pytest.raises(InvalidArgumentError) as error:
            load_devices(write({"NVIDIA H200": entry}))
        assert "NVIDIA H200" in str(error.value)
        return str(error.value)

    good = table["NVIDIA H200"]
    assert "none for sm_count" in refused({k: v for k, v in good.items() if k != "sm_count"})
    assert "did you mean 'sm_count'" in refused(good | {"sm_counts": good["sm_count"]})
    assert "sm_count: expected a positive integer" in refused(good | {"sm_count": "132"})
    assert "aliases: expected a list of names" in refused(good | {"aliases": "H200"})
    assert "an object with one entry per key" in refused([1])


def test_table_mentions_no_sparse_peak():
    # The datasheets print twice these figures for 2:4 sparse matrices.
    for spec in load_devices().values():
        assert spec.entry("peak_bfloat16_float32_tflops").kind == "dense"
        assert spec.peak_tflops("bfloat16") < 2500
