"""Record the README's moving picture: `python -m tests.browser.record docs/images/board.gif`.

A real JupyterLab in a real browser, four ranks, and loading data is slow on rank 2. Nothing is
drawn here: each frame is a screenshot of the cell's output.
"""

import io
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests import groups
from tests.browser.lab import Lab, OpenNotebook

FRAME_S, LAST_S = 1.0, 5.0  # the board moves more often: half of the frames are half of the file
COLORS = 128
WIDTH = 960  # pixels

START = """
%load_ext nbdist
%config NBDist.theme = "light"
%dist start -n 4 --device cpu
"""

TRAIN = """
%%distributed --run slow-loader
import time
from torch import nn

class Digits(torch.utils.data.Dataset):
    def __len__(self):
        return 8192
    def __getitem__(self, i):
        time.sleep(0.006 if rank == 2 else 0.0001)  # a slow disk
        x = torch.randn(64, generator=torch.Generator().manual_seed(i))
        return x, x[:10].argmax()

torch.manual_seed(0)
model  = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
layout = nbdist.parallelize(model, "ddp")
opt    = torch.optim.AdamW(model.parameters(), lr=2e-3)
for x, y in nbdist.loader(Digits(), global_batch=64, seed=0):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
"""


def frames(folder: Path) -> Iterator[Image.Image]:
    """Yield what the output of a training looks like, from its first sign of life to its end."""
    chromium = groups.find_chromium()
    assert chromium is not None, "no Chromium on this machine"
    with sync_playwright() as playwright, Lab(folder) as lab:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        notebook = OpenNotebook(lab, browser)
        notebook.run(START).wait()
        cell = notebook.run(TRAIN)
        cell.output.locator(".nbdist-board").first.wait_for()
        while cell.is_running:
            began = time.monotonic()
            yield Image.open(io.BytesIO(cell.output.first.screenshot())).convert("RGB")
            time.sleep(max(0.0, FRAME_S - (time.monotonic() - began)))
        yield Image.open(io.BytesIO(cell.output.first.screenshot())).convert("RGB")
        notebook.close()
        browser.close()


def save(pictures: list[Image.Image], path: Path) -> None:
    """Write the frames as one GIF that repeats, on a page as high as the highest."""
    width, height = pictures[-1].width, max(picture.height for picture in pictures)
    pages = []
    for picture in pictures:
        page = Image.new("RGB", (width, height), "white")
        page.paste(picture)
        size = (WIDTH, WIDTH * height // width)
        pages.append(page.resize(size, Image.Resampling.LANCZOS))
    palette = pages[-2].quantize(COLORS)
    shown = [page.quantize(palette=palette, dither=Image.Dither.NONE) for page in pages]
    times = [int(1000 * FRAME_S)] * (len(shown) - 1) + [int(1000 * LAST_S)]
    shown[0].save(path, save_all=True, append_images=shown[1:], duration=times, loop=0)


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        taken = list(frames(Path(temporary)))
    save(taken, chosen)
    print(f"{len(taken)} frames, {chosen.stat().st_size // 1000} kB")
