"""House rules of the Triton kernels, read off their source: what the interpreter hides and the GPU punishes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).parent.parent.parent / "kernels"
TESTS = Path(__file__).parent

BANNED = {
    "make_block_ptr": "block pointers are gone from Triton 3.9",
    "advance": "block pointers are gone from Triton 3.9",
    "autotune": "tuning needs a GPU at run time: `kernels.configs` is the table",
    "device_assert": "it never fires in the interpreter: check in the wrapper",
    "inline_asm_elementwise": "the interpreter cannot run it",
    "libdevice": "the interpreter cannot run it",
}
# Loads of block numbers: what they are multiplied with exceeds 32 bits in a pool of a few GB.
BLOCK_NAMES = ("block", "source_block", "target_block", "slot")


def jitted(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(
            "jit" in ast.unparse(d) for d in node.decorator_list
        ):
            yield node


def violations(source: str) -> list[str]:
    """Every broken rule of one file, with its line."""
    found = []
    for function in jitted(ast.parse(source)):
        for node in ast.walk(function):
            name = getattr(node, "attr", getattr(node, "id", ""))
            if name in BANNED:
                found.append(f"{node.lineno}: {name}: {BANNED[name]}")
            if name in ("bfloat16", "bf16"):
                found.append(
                    f"{node.lineno}: a kernel names no 16-bit type: it follows its arguments"
                )
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in BLOCK_NAMES:
                value = ast.unparse(node.value)
                loaded = "tl.load(" in value and "slots_ptr" not in value
                if loaded and "to(tl.int64)" not in value:
                    found.append(
                        f"{node.lineno}: block numbers are widened to 64 bits where they are loaded"
                    )
            if (
                isinstance(node, ast.For)
                and "sweep" in function.name
                and "num_stages" in ast.unparse(node.iter)
            ):
                found.append(
                    f"{node.lineno}: a stage count on this loop stages the block table, and nothing else"
                )
        for argument in function.args.args:
            stride = "STRIDE" in argument.arg.upper()
            if stride and (
                argument.annotation is None or "constexpr" not in ast.unparse(argument.annotation)
            ):
                found.append(
                    f"{function.lineno}: stride {argument.arg} is no compile-time constant"
                )
    return found


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda path: path.name)
def test_kernels_keep_the_house_rules(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8")) == []


def test_no_bfloat16_where_kernels_are_interpreted() -> None:
    """Guards against a test that passes on garbage: the interpreter computes on bfloat16's bit patterns. The contract
    only compiles, and `scaled_linear` has ways that are PyTorch's alone, so both may name the type, and so may a test
    for a GPU alone, in a line that says so."""
    without = {Path(__file__).name, "test_scaled_linear.py"}
    wrong = [
        f"{path.name}:{number}"
        for path in sorted(TESTS.glob("*.py"))
        if path.name not in without
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "torch.bfloat16" in line and "raises" not in line and not line.endswith("# on a GPU")
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("p = tl.make_block_ptr(x, (1,), (1,), (0,), (1,), (0,))", "block pointers"),
        ("block = tl.load(x)", "64 bits"),
        ("y = x.to(tl.bfloat16)", "16-bit type"),
        ("tl.device_assert(x > 0)", "never fires"),
    ],
)
def test_the_rules_can_be_broken(body: str, rule: str) -> None:
    source = f"@triton.jit\ndef kernel(x):\n    {body}\n"
    assert len(violations(source)) == 1 and rule in violations(source)[0]
    assert violations("@triton.jit\ndef kernel(x, STRIDE_BLOCK):\n    pass\n")
    assert not violations(f"def plain(x):\n    {body}\n")
