# SPDX-License-Identifier: Apache-2.0
"""Photographs the pages of a server, for the documentation. scripts/screenshots starts the server and its trainers.

  screenshots.py URL LOSSCTL GRPC SECONDS FOLDER

Saves the head lm-head a few times in SECONDS, then writes status-page.png, status-page-head.png and status-page-phone.png to FOLDER, each
in 256 colours (pngquant).
"""

import subprocess
import sys
import time
from pathlib import Path

from browser import Browser

HEAD = "lm-head"
# Path, width, height, dark, and the scale of the picture.
PICTURES = {
    "status-page": ("/", 1200, 1590, False, 1.0),
    "status-page-head": (f"/heads/{HEAD}", 1000, 1040, False, 1.0),
    "status-page-phone": ("/", 390, 1040, True, 1.5),
}


def main(url: str, lossctl: str, grpc: str, seconds: int, folder: Path) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, max(seconds / 6, 10)))  # the trainer makes the head meanwhile
        subprocess.run([lossctl, f"--server={grpc}", "save", HEAD, "--keep=3"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([lossctl, f"--server={grpc}", "describe", "no-such-head"], check=False, stderr=subprocess.DEVNULL)
    time.sleep(5)
    browser = Browser()
    for name, (path, width, height, dark, scale) in PICTURES.items():
        browser.look(width, height, dark, scale)
        browser.open(url + path)
        browser.wait_for("charts", lambda: browser.evaluate("document.querySelectorAll('.chart path').length > 3"))
        time.sleep(3)  # the first renewal
        small = subprocess.run(["pngquant", "--strip", "--speed=1", "256", "-"], input=browser.screenshot(), stdout=subprocess.PIPE,
                               check=True).stdout
        (folder / f"{name}.png").write_bytes(small)
        print(f"{folder / name}.png: {len(small) / 1024:.0f} KiB")
    browser.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
