"""Examples run without warnings, and print and save what they promise."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import numpy
import pytest
from matplotlib.image import imread
from sklearn.datasets import load_digits

ROOT = Path(__file__).parents[1]


def python(*arguments: str | Path) -> subprocess.CompletedProcess:
    """Run a fresh interpreter in the checkout, in which warnings are errors."""
    return subprocess.run([sys.executable, "-W", "error", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False)


def digits(*arguments: str | Path) -> str:
    """Run the example; return what it prints."""
    done = python("examples/digits.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(table: str) -> dict[str, list[float]]:
    """The numbers of each optimizer: loss, accuracy in percent, steps to the target (if reached), and two ratios for each of three layers."""
    lines = [re.match(r"(SGD|GGN diagonal|KFAC) +(\S.*)", line) for line in table.splitlines()]
    return {line[1]: [float(number) for number in re.findall(r"-?\d+\.?\d*", line[2].replace("->", " "))] for line in lines if line}


def check_picture(path: Path) -> None:
    """The picture can be decoded, has a size that fits a page, and shows something in each quarter."""
    pixels = imread(path, format="png")[..., :3]
    height, width, _ = pixels.shape
    assert 600 < height < 1500 and 1000 < width < 2500
    halves = [slice(None, height // 2), slice(height // 2, None)], [slice(None, width // 2), slice(width // 2, None)]
    assert all(pixels[top, left].std() > 0.05 for top in halves[0] for left in halves[1])


def test_digits(tmp_path: Path) -> None:
    """A quick run prints the whole table; curvature pays from the first steps; the same seed gives the same numbers, another seed does not."""
    printed = digits("--quick", "--figure", tmp_path / "new" / "picture.png")
    check_picture(tmp_path / "new" / "picture.png")
    assert "1438 training and 359 test images, 10 steps with 64 images each, seed 0" in printed

    predicted, measured = (
        float(number) for number in re.search(r"predicted from inside (\S+), measured between mini-batches (\S+)", printed).groups()
    )
    assert 0.5 < measured / predicted < 2

    table = rows(printed)
    assert {name: len(numbers) for name, numbers in table.items()} == {"SGD": 8, "GGN diagonal": 8, "KFAC": 8}
    assert numpy.isfinite(list(table.values())).all()
    assert table["KFAC"][0] < table["GGN diagonal"][0] < table["SGD"][0] < 2.5
    assert all(0 <= numbers[1] <= 100 for numbers in table.values()) and table["KFAC"][1] > 40

    assert rows(digits("--quick", "--figure", tmp_path / "again.png")) == table
    assert rows(digits("--quick", "--figure", tmp_path / "other.png", "--seed", "1")) != table


@pytest.mark.slow
def test_digits_in_full(tmp_path: Path) -> None:
    """The complete run, with all that it claims."""
    table = rows(digits("--figure", tmp_path / "picture.png"))
    check_picture(tmp_path / "picture.png")
    assert {name: len(numbers) for name, numbers in table.items()} == {"SGD": 9, "GGN diagonal": 9, "KFAC": 9}


def write_idx(path: Path, content: numpy.ndarray) -> None:
    """Write bytes in the format of MNIST's files."""
    header = bytes([0, 0, 8, content.ndim]) + b"".join(size.to_bytes(4, "big") for size in content.shape)
    path.write_bytes(header + content.astype(numpy.uint8).tobytes())


def test_digits_from_mnist_files(tmp_path: Path) -> None:
    """Files in MNIST's format (here the small digits, enlarged) are read from the given folder."""
    scans = load_digits()
    images = (scans.images * (255 / 16)).repeat(3, 1).repeat(3, 2)
    images = numpy.pad(images, ((0, 0), (2, 2), (2, 2)))
    for prefix, part in [("train", slice(200, None)), ("t10k", slice(None, 200))]:
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte", images[part])
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", scans.target[part])

    printed = digits("--data", "mnist", "--root", tmp_path, "--quick", "--figure", tmp_path / "picture.png")
    check_picture(tmp_path / "picture.png")
    assert "1597 training and 200 test images, 10 steps" in printed
    assert rows(printed)["KFAC"][1] > 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "mnist", "--root", "nowhere"], "MNIST is not there"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--data", "x"], "mnist"),
    ],
)
def test_digits_with_bad_arguments(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["digits.py", *arguments])
    with pytest.raises((SystemExit, FileNotFoundError)) as stop:
        run_path(str(ROOT / "examples" / "digits.py"))
    assert getattr(stop.value, "code", 1)
    assert message in f"{stop.value}{capsys.readouterr().err}"


SCRIPTS = sorted(path.stem for path in (ROOT / "examples").glob("[!_]*.py"))
QUICK = ["mislabelled_digits", "influence", "hook_memory"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_example_has_its_place_and_form(name: str) -> None:
    """A title and an introduction, text in cells, claims, a place in the gallery, and a picture at the end."""
    source = (ROOT / "examples" / f"{name}.py").read_text()
    tree = ast.parse(source)
    title, underline, empty, *introduction = ast.get_docstring(tree).splitlines()
    assert underline == "=" * len(title) and not empty and introduction
    assert source.count("\n# %%") >= 3
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    assert f'    "{name}",' in (ROOT / "docs" / "gallery_settings.py").read_text()
    assert f'save(figure, "{name}")\n' in source.splitlines(keepends=True)[-1] or name == "digits"


def run_example(name: str) -> None:
    """The example holds what it asserts, without warnings, and saves a picture that shows something."""
    picture = ROOT / "examples" / "output" / f"{name}.png"
    picture.unlink(missing_ok=True)
    done = python(f"examples/{name}.py")
    assert done.returncode == 0, done.stdout + done.stderr
    pixels = imread(picture, format="png")[..., :3]
    height, width, _ = pixels.shape
    assert 350 < height < 1100 and 1000 < width < 1800
    assert all(half.std() > 0.05 for half in (pixels[:, : width // 2], pixels[:, width // 2 :]))


@pytest.mark.parametrize("name", QUICK)
def test_quick_examples(name: str) -> None:
    run_example(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in {"digits", *QUICK}])
def test_other_examples(name: str) -> None:
    run_example(name)
