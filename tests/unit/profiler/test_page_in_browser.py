"""The page in headless Chromium: it draws, zooms and moves, runs nothing of a name, and loads nothing."""

import html
import json
import re
import shutil
import subprocess

import pytest

from rayagi.profiler.overlap import breakdown
from rayagi.profiler.page import report_page
from rayagi.profiler.summary import waits
from rayagi.profiler.timeline import timeline
from rayagi.profiler.trace import Category as C
from tests.unit.profiler.traces import process, profile

BROWSER = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None
)
MS = 1_000_000
HOSTILE = "</script><img src=x onerror=\"ran('image')\"><script>ran('name')</script>"

FIRST = """<script>
const ran = [];
addEventListener("error", event => ran.push(event.message));
</script>"""
"""Before the page: what a name runs, and what goes wrong."""
LAST = """<script>
const canvas = document.getElementById("timeline"), hover = document.getElementById("hover");
const box = () => canvas.getBoundingClientRect();
const at = share => ({ clientX: box().left + share * box().width, clientY: box().top + 10, bubbles: true });
const seen = {};
const look = (name, share) => {
  canvas.dispatchEvent(new PointerEvent("pointermove", at(share)));
  seen[name] = hover.textContent;
};
const pixel = share => {
  const scale = canvas.width / canvas.clientWidth, height = canvas.height - 4 * scale;
  return [...canvas.getContext("2d").getImageData(Math.floor(share * canvas.width), Math.floor(height), 1, 1).data];
};
seen.simulator = pixel(0.1); seen.python = pixel(0.8);
look("start", 0.25);
canvas.dispatchEvent(new WheelEvent("wheel", { ...at(0), deltaY: -400 * Math.log(4), cancelable: true }));
look("zoomed", 1);
canvas.dispatchEvent(new PointerEvent("pointermove", { ...at(0.5), buttons: 1, movementX: -canvas.clientWidth }));
look("moved", 0);
canvas.dispatchEvent(new MouseEvent("dblclick", at(0.5)));
look("everything", 0.25);
seen.ran = ran; seen.loaded = performance.getEntriesByType("resource").length;
document.body.innerHTML = "<pre id=seen></pre>";
document.getElementById("seen").textContent = JSON.stringify(seen);
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_in_a_browser(tmp_path):
    events = [
        (C.THREAD, 0, 100 * MS, "main", 0),
        (C.OPERATION, 0, 50 * MS, HOSTILE, 1),
        (C.SIMULATOR, 0, 50 * MS, HOSTILE, 0),
        (C.WAIT, 90 * MS, 91 * MS, HOSTILE, 0),
    ]
    found = profile(process([events], HOSTILE))
    page = report_page(found, breakdown(found), waits(found), timeline(found))
    assert "<body>" in page
    file = tmp_path / "page.html"
    file.write_text(
        page.replace("<body>", f"<body>{FIRST}").replace("</body>", f"{LAST}</body>"), encoding="utf-8"
    )
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'browser'}",
    ]
    done = subprocess.run(
        [*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=100, check=True
    )
    text = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text is not None, done.stdout
    seen = json.loads(html.unescape(text[1]))
    assert (seen["ran"], seen["loaded"]) == ([], 0)
    assert seen["simulator"] == [0x44, 0x77, 0xAA, 255]
    assert seen["python"] == [0xCC, 0xBB, 0x44, 255]
    # 100 ms in all; four times as large, a quarter of them is seen, then the next quarter.
    times = {name: seen[name].split("  ")[0] for name in ("start", "zoomed", "moved", "everything")}
    assert times == {"start": "25.00 ms", "zoomed": "25.00 ms", "moved": "25.00 ms", "everything": "25.00 ms"}
    assert f"{HOSTILE} (50.00 ms)  simulator 100 %" in seen["start"]
