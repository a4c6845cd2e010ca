"""What the examples share: scans of digits as tensors, and one look for all pictures. Importing it sets the look, a seed, and a single thread."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

OUTPUT = Path(__file__).with_name("output")  # where pictures are saved
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0060a8", "#e07b00", "#2a9d5c", "#8e4da8", "#6b6b6b"

torch.manual_seed(0)
torch.set_num_threads(1)  # matrices as small as these gain nothing from more
plt.rcParams.update(
    {
        "figure.facecolor": "white",  # readable on light and on dark pages
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
        "axes.prop_cycle": plt.cycler(color=[BLUE, ORANGE, GREEN, PURPLE, GREY]),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titleweight": "bold",
        "axes.titlesize": 11,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "image.cmap": "viridis",
    }
)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scikit-learn's scans, 8 x 8 grey values between 0 and 1: training images ``[1438, 64]`` and labels, test images ``[359, 64]`` and labels."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images.float()[order] / 16, labels[order]
    test = len(images) // 5
    return images[test:], labels[test:], images[:test], labels[:test]


def memory(function: Callable) -> tuple[list[float], list[float]]:
    """Memory in use while a function runs, as PyTorch's profiler writes it down: times in ms and MiB, both counted from the beginning."""
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            function()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    start, before = events[0]["ts"], events[0]["args"]["Total Allocated"] - events[0]["args"]["Bytes"]
    return [(event["ts"] - start) / 1e3 for event in events], [(event["args"]["Total Allocated"] - before) / 2**20 for event in events]


def save(figure: Figure, name: str) -> None:
    """Save a picture in the folder ``output`` beside the examples."""
    OUTPUT.mkdir(exist_ok=True)
    figure.savefig(OUTPUT / f"{name}.png")
    print(f"saved examples/output/{name}.png")
