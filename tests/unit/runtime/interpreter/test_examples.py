"""The examples in cuda.tile's own documentation, run on the CPU interpreter.

They are collected from the installed package, with the output that it documents.
"""

import contextlib
import inspect
import io
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from mla_var3.errors import InterpreterError
from mla_var3.runtime import interpreter
from tests.unit.runtime.interpreter.interpreter_support import REFUSED, public_objects

_PREAMBLE = "import math\nimport torch\nimport cuda.tile as ct\nstream = None\n"
_ON_THE_CPU = (
    ("cuda:0", "cpu"),
    ("torch.cuda.current_stream()", "stream"),
    ("torch.cuda.synchronize()", "pass"),
    ("ct.launch(", "launch_example("),
)


class Example(NamedTuple):
    """A documented example: a program and its output."""

    id: str
    code: str
    output: str


def directive_blocks(text: str) -> Iterator[tuple[str, dict[str, str], str]]:
    """The (name, options, content) of each testcode and testoutput directive in a docstring."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        match = re.match(r"( *)\.\. (testcode|testoutput)::$", line)
        if not match:
            continue
        block = []
        for following in lines[number + 1 :]:
            if following.strip() and not following.startswith(match[1] + " "):
                break
            block.append(following)
        options = {}
        while block and (option := re.match(r" *:(\w+): *(.*)", block[0])):
            options[option[1]] = option[2]
            block.pop(0)
        yield match[2], options, textwrap.dedent("\n".join(block)).strip("\n")


def collect_examples() -> list[Example]:
    examples = []
    for name, documented in public_objects():
        blocks = directive_blocks(inspect.cleandoc(getattr(documented, "__doc__", None) or ""))
        waiting: str | None = None
        for kind, options, content in blocks:
            if kind == "testoutput" and waiting is not None:
                examples.append(Example(f"{name}-{len(examples)}", waiting, content.strip()))
                waiting = None
            elif kind == "testcode":
                if options["template"] == "kernel_wrapper.py":
                    content = "@ct.kernel\ndef kernel():\n" + textwrap.indent(content, "    ")
                    content += "\n\nct.launch(stream, (1,), kernel, ())"
                waiting = content
    return examples


EXAMPLES = [example for example in collect_examples() if not REFUSED.search(example.id)]
assert len(EXAMPLES) > 100  # the package documents 139


def run(example: Example) -> str:
    """The output of an example, with its kernels launched on the interpreter."""
    code = _PREAMBLE + example.code
    for on_gpu, on_cpu in _ON_THE_CPU:
        code = code.replace(on_gpu, on_cpu)

    def launch_example(stream: None, grid: Any, kernel: Any, args: Any) -> None:
        interpreter.launch(grid, kernel, args)

    namespace = {"__name__": "example", "launch_example": launch_example}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, f"<example {example.id}>", "exec"), namespace)
    return output.getvalue()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.id)
def test_documented_example(example):
    if example.output.startswith("Traceback"):
        with pytest.raises(InterpreterError) as caught:
            run(example)
        error_name, _, message = example.output.splitlines()[-1].partition(": ")
        cause = caught.value.__cause__
        assert type(cause).__name__ == error_name
        pattern = re.escape(message).replace(re.escape("..."), ".*")
        assert re.search(pattern, str(caught.value), re.DOTALL)
    else:
        assert run(example).split() == example.output.split()
