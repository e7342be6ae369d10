"""Ids, modules and folders."""

import pytest

from mla_var3.errors import MissingToolError, UnknownNameError
from mla_var3.runtime import paths
from mla_var3.runtime.paths import KernelId, find_kernel, import_kernel_module, split_full_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, (name, 0)) for name in ("mla_var6_plus", "name_v0", "name_v01", "name_v")),
        *(("mla_var6_plus_v12", ("mla_var6_plus", 12)), ("flash_v2_v3", ("flash_v2", 3))),
    ],
)
def test_full_names(name, expected):
    assert split_full_name(name) == expected


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with later versions and another language."""
    numbers = {"mla_var6_plus": (0, 1, 4), "flash_mla": (0,), "flash_attention": (0, 2)}
    kernels = [
        KernelId(design, n, "cutile-dsl", "mla") for design, some in numbers.items() for n in some
    ]
    kernels.append(KernelId("flash_cute", 0, "cute-dsl", "mla"))
    monkeypatch.setattr(paths, "discover_kernels", lambda: sorted(kernels))


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(
    ("name", "version", "number"),
    [
        *(("mla_var6_plus", version, 0) for version in (None, "v0", "0", "base")),
        *(("mla_var6_plus", version, 4) for version in ("v4", "4")),
        *(("mla_var6_plus_v4", version, 4) for version in (None, "v4")),
        *(("mla_var6_plus:v4", "4", 4), ("mla_var6_plus:base", "v0", 0)),
    ],
)
def test_what_a_user_may_type(name, version, number):
    assert find_kernel(name, version) == KernelId("mla_var6_plus", number, "cutile-dsl", "mla")


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("mla_var6", "mla_var6_plus"),
        ("mla_var6_plus_v0", "mla_var6_plus"),
        ("flash_mal", "flash_mla"),
        ("flashattention", "flash_attention"),
    ],
)
def test_a_wrong_kernel_suggests_the_nearest(name, nearest):
    with pytest.raises(UnknownNameError, match=f"unknown kernel '{name}'") as caught:
        find_kernel(name)
    assert f"did you mean '{nearest}'" in str(caught.value)
    assert "known: flash_attention, flash_cute, flash_mla, mla_var6_plus" in str(caught.value)
    with pytest.raises(UnknownNameError, match=f"unknown cutile-dsl kernel '{name}'") as caught:
        find_kernel(name, language="cutile-dsl")
    assert "known: flash_attention, flash_mla, mla_var6_plus" in str(caught.value)


@pytest.mark.usefixtures("versions")
def test_a_design_in_one_language_needs_no_option():
    for name, language in (
        ("flash_cute", None),
        ("flash_cute", "cute-dsl"),
        ("flash_cute:cute-dsl", None),
        ("flash_cute:v0:cute-dsl", "cute-dsl"),
    ):
        assert find_kernel(name, language=language).language == "cute-dsl"
    with pytest.raises(UnknownNameError, match="It exists in cute-dsl: use --language"):
        find_kernel("flash_cute", language="cutile-dsl")


@pytest.mark.usefixtures("versions")
def test_a_version_in_one_language_needs_no_option(monkeypatch):
    both = [
        *paths.discover_kernels(),
        *(KernelId("mla_var6_plus", n, "cute-dsl", "mla") for n in (0, 7)),
    ]
    monkeypatch.setattr(paths, "discover_kernels", lambda: both)
    for name, version in (("mla_var6_plus_v7", None), ("mla_var6_plus", "v7")):
        assert find_kernel(name, version).language == "cute-dsl"
    for name in ("mla_var6_plus", "mla_var6_plus_v4"):
        assert find_kernel(name).language == "cutile-dsl"
    with pytest.raises(UnknownNameError, match="v7 exists in cute-dsl"):
        find_kernel("mla_var6_plus_v7", language="cutile-dsl")
    with pytest.raises(UnknownNameError, match="known: v0, v1, v4, v7"):
        find_kernel("mla_var6_plus", "v9")


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(
    ("version", "quoted"),
    [("v5", "v5"), ("5", "v5"), ("", ""), ("latest", "latest"), ("x4", "x4"), ("04", "v04")],
)
def test_a_wrong_version_is_quoted_and_the_known_ones_listed(version, quoted):
    with pytest.raises(UnknownNameError) as caught:
        find_kernel("mla_var6_plus", version)
    wanted = f"unknown version of mla_var6_plus '{quoted}'"
    for words in (wanted, "known: v0, v1, v4", "v0 is the base version"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("class Plan:\n    targets = ['sm_90']", ("sm_90",)),
        ("class Plan:\n    targets: ClassVar[tuple[str, ...]] = ('sm_90',)", ("sm_90",)),
        ("targets = ('sm_90',)\ntargets = others()\ndel targets", ("sm_90",)),
        ("targets: tuple[str, ...]\nother = 1", paths.TARGETS),
    ],
)
def test_targets_are_read_from_the_source(source, targets):
    assert paths.targets_in(source) == targets


def test_a_written_file_has_the_mode_of_any_other(tmp_path, monkeypatch):
    """The mask of the process is not touched: for a moment other threads would have it too."""
    (tmp_path / "plain").touch()
    monkeypatch.setattr("os.umask", None)
    paths.write_atomic(tmp_path / "atomic", "text")
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert set(modes) == {"plain", "atomic"} and modes["plain"] == modes["atomic"]


def test_a_missing_language_names_the_extra(monkeypatch):
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'cuda'", name="cuda")

    monkeypatch.setattr(paths.importlib, "import_module", fail)
    message = r'needs the package cuda-tile.*pip install "hyper-mla\[cutile\]"'
    with pytest.raises(MissingToolError, match=message):
        import_kernel_module(KernelId("mla_var6_plus", 0, "cutile-dsl", "mla"))
