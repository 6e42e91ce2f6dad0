# SPDX-License-Identifier: Apache-2.0
"""`lossctl watch` and `top` on a terminal: what is on the screen at several widths, keys, and every way out.

    python3 live_test.py LOSSD LOSSCTL
"""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest
from pathlib import Path


# A terminal that programs draw on: what they have on the screen, as text and with colours.
#
# Understands what lossctl writes, and says so if there is more: SGR, cursor home, erase to the end of line and screen, the
# second screen, the cursor's visibility. Not thread-safe.

_SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


class Screen:
    """Cells of a terminal of so many columns and lines, each a character and its SGR codes."""

    def __init__(self, columns, lines):
        self.columns, self.lines = columns, lines
        self.second = False  # the second screen is shown
        self.cursor_shown = True
        self._clear()
        self._style = ()
        self._rest = ""
        self._of_old_size = 0  # pictures that may have been begun before a resize

    def _clear(self):
        self._cells = [[(" ", ())] * self.columns for _ in range(self.lines)]
        self._line = self._column = 0

    def resize(self, columns, lines):
        """The picture that the program is drawing meanwhile is cut."""
        self.columns, self.lines = columns, lines
        self._of_old_size = 2  # the one that is being written, and one for which it has asked the size already
        self._clear()

    def feed(self, text):
        """Takes what a program has written. A line that does not fit is an error: it would wrap."""
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = _SEQUENCE.match(text, at)
                if not found:
                    if len(text) - at < 16:
                        self._rest = text[at:]
                        return
                    raise ValueError(f"not understood: {text[at:at + 16]!r}")
                self._control(*found.groups())
                at = found.end()
                continue
            self._character(text[at])
            at += 1

    def _character(self, character):
        if character == "\r":
            self._column = 0
        elif character == "\n":
            if self._line + 1 >= self.lines:
                self._cells = [*self._cells[1:], [(" ", ())] * self.columns]
            else:
                self._line += 1
        else:
            if self._column >= self.columns:
                if self._of_old_size:
                    return
                raise ValueError(f"line {self._line + 1} is wider than {self.columns} columns: {self.text()}")
            self._cells[self._line][self._column] = (character, self._style)
            self._column += 1

    def _control(self, private, numbers, letter):
        if private:
            if numbers == "1049":
                self.second = letter == "h"
                self._clear()
            elif numbers == "25":
                self.cursor_shown = letter == "h"
        elif letter == "m":
            codes = tuple(int(number or 0) for number in numbers.split(";"))
            self._style = () if codes == (0,) else codes
        elif letter == "H" and not numbers:
            self._line = self._column = 0
            self._of_old_size = max(0, self._of_old_size - 1)
        elif letter in "JK" and not numbers:
            self._cells[self._line][self._column:] = [(" ", ())] * (self.columns - self._column)
            if letter == "J":
                for line in range(self._line + 1, self.lines):
                    self._cells[line] = [(" ", ())] * self.columns
        else:
            raise ValueError(f"not understood: {private}{numbers}{letter}")

    def cells(self):
        return [list(line) for line in self._cells]

    def text(self):
        """What is shown, without spaces at the ends of lines."""
        return "\n".join("".join(character for character, _ in line).rstrip() for line in self._cells).rstrip() + "\n"


class Program:
    """A program on a terminal of its own."""

    def __init__(self, command, columns, lines, environment=None):
        self.screen = Screen(columns, lines)
        self.output = ""
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            try:
                self._set_size(0, columns, lines)
                os.execvpe(command[0], command, {**os.environ, "TERM": "xterm", **(environment or {})})
            finally:
                os._exit(127)
        self.exit_status = None
        self._bytes = b""

    @staticmethod
    def _set_size(descriptor, columns, lines):
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns, lines):
        """The program is told with SIGWINCH."""
        while select.select([self._terminal], [], [], 0)[0] and self.exit_status is None:
            self._read(0)
        self._set_size(self._terminal, columns, lines)
        self.screen.resize(columns, lines)

    def type(self, keys):
        os.write(self._terminal, keys.encode())

    def signal(self, number):
        os.kill(self._pid, number)

    def attributes(self):
        """The terminal's, as termios has them."""
        return termios.tcgetattr(self._terminal)

    def run_until(self, condition, seconds=30):
        """Reads what the program writes until `condition` is true of this object; TimeoutError with the screen."""
        end = time.monotonic() + seconds
        while not condition(self):
            if self.exit_status is not None or time.monotonic() > end:
                raise TimeoutError(f"exit status {self.exit_status}, screen:\n{self.screen.text()}\noutput: {self.output[-2000:]!r}")
            self._read(0.2)
        return self

    def wait(self, seconds=30):
        """The exit status, as waitpid has it."""
        end = time.monotonic() + seconds
        while self.exit_status is None:
            if time.monotonic() > end:
                raise TimeoutError(f"it runs on; screen:\n{self.screen.text()}")
            self._read(0.1)
        return self.exit_status

    def _read(self, seconds):
        if select.select([self._terminal], [], [], seconds)[0]:
            try:
                self._bytes += os.read(self._terminal, 1 << 16)
            except OSError:  # the program has gone
                pass
            text = self._bytes.decode(errors="ignore")
            self._bytes = self._bytes[len(text.encode()):]
            self.output += text
            self.screen.feed(text)
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid and not select.select([self._terminal], [], [], 0)[0]:
            self.exit_status = status
        elif pid:
            while select.select([self._terminal], [], [], 0)[0]:
                try:
                    text = os.read(self._terminal, 1 << 16).decode(errors="ignore")
                except OSError:
                    break
                self.output += text
                self.screen.feed(text)
            self.exit_status = status

    def close(self):
        if self.exit_status is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._terminal)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# The tests.

LOSSD, LOSSCTL = sys.argv[1:3]
ECHO = 3  # of termios' attributes, where the local flags are


def start(folder, *flags):
    ports = Path(folder, "ports.json")
    ports.unlink(missing_ok=True)
    server = subprocess.Popen([LOSSD, "--listen=127.0.0.1:0", "--http=127.0.0.1:0", "--backend=cpu", "--threads=1",
                               "--log_level=off", f"--port_file={ports}", "--staging_bytes=4MiB", "--slice_bytes=64KiB",
                               "--workspace_bytes=4MiB", *flags])
    end = time.monotonic() + 60
    while not ports.exists() or not ports.read_text().strip().endswith("}"):
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError("lossd did not start")
        time.sleep(0.02)
    return server, json.loads(ports.read_text())["grpc"]


class LiveTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        for name in ("LOSSD_SERVER", "LOSSD_CONTEXT", "NO_COLOR"):
            os.environ.pop(name, None)
        cls.folder = tempfile.TemporaryDirectory()
        os.environ["LOSSD_CONFIG"] = str(Path(cls.folder.name, "contexts.json"))
        cls.server, cls.target = start(cls.folder.name)
        cls.run_lossctl("create", "lm_head", "--hidden", "8", "--vocab", "50")
        for _ in range(3):
            cls.train()

    @classmethod
    def tearDownClass(cls):
        cls.server.terminate()
        cls.server.wait()
        cls.folder.cleanup()

    @classmethod
    def run_lossctl(cls, *arguments):
        return subprocess.run([LOSSCTL, "--server", cls.target, *arguments], check=True, capture_output=True, text=True).stdout

    @classmethod
    def train(cls):
        cls.run_lossctl("loss", "lm_head", "--random", "100", "--accumulate")
        cls.run_lossctl("step", "lm_head", "--lr", "0.1")

    def live(self, *arguments, columns=80, lines=24, **environment):
        program = Program([LOSSCTL, "--server", self.target, *arguments, "--interval", "0.1"], columns, lines, environment)
        self.addCleanup(program.close)
        return program

    def shows(self, program, *texts):
        program.run_until(lambda it: all(text in it.screen.text() for text in texts))

    def restored(self, program, before=None):
        self.assertFalse(program.screen.second)
        self.assertTrue(program.screen.cursor_shown)
        if before is not None:
            self.assertEqual(program.attributes()[:4], before[:4])

    def test_watch_fits_every_width(self):
        for columns in (40, 80, 200):
            with self.subTest(columns=columns):
                program = self.live("watch", columns=columns)
                self.shows(program, f"lossd at {self.target}", "lm_head", "LOSS", "rows/s", "% busy", "q: leave")
                text = program.screen.text()
                self.assertEqual("HIDDEN x VOCAB" in text, columns == 200, text)
                self.train()
                program.run_until(lambda it: "▁" in it.screen.text())
                program.type("q")
                self.assertEqual(program.wait(), 0)
                self.restored(program)

    def test_few_lines_keep_the_heads(self):
        program = self.live("watch", lines=8)
        self.shows(program, "rows/s", "lm_head", "q: leave")
        self.assertNotIn("round trip", program.screen.text())

    def test_watch_follows_the_size(self):
        program = self.live("watch", columns=200, lines=40)
        self.shows(program, "HIDDEN x VOCAB")
        program.resize(40, 20)
        program.run_until(lambda it: "lm_head" in it.screen.text())
        self.assertNotIn("HIDDEN x VOCAB", program.screen.text())
        program.resize(200, 40)
        self.shows(program, "HIDDEN x VOCAB")

    def test_losses_become_a_line(self):
        program = self.live("watch")
        self.shows(program, "LOSS")
        for _ in range(3):
            self.train()
        program.run_until(lambda it: any(line.startswith("lm_head") and "█" in line and "▁" in line
                                         for line in it.screen.text().splitlines()))

    def test_every_way_out_gives_the_terminal_back(self):
        for name in ("q", "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGABRT", "SIGSEGV"):
            with self.subTest(way=name):
                program = self.live("watch")
                before = program.attributes()
                self.shows(program, "lm_head")
                self.assertTrue(program.screen.second)
                self.assertNotEqual(program.attributes()[ECHO], before[ECHO])
                if name == "q":
                    program.type("q")
                else:
                    program.signal(getattr(signal, name))
                status = program.wait()
                if name in ("SIGABRT", "SIGSEGV"):
                    self.assertEqual(os.WTERMSIG(status), getattr(signal, name))
                else:
                    self.assertEqual(status, 0)
                self.restored(program, before)

    def test_keys_that_come_together_all_count(self):
        for keys in ("xxq", "\x1b[A\x1b[1;5Cq", "\x1bOP\x1bqzq"):  # arrows, F1, Alt-q
            with self.subTest(keys=keys):
                program = self.live("watch")
                self.shows(program, "lm_head")
                program.type(keys)
                self.assertEqual(program.wait(), 0)
        program = self.live("watch", "--count", "20")
        self.shows(program, "lm_head")
        program.type("\x1bq\x1b[q")
        program.run_until(lambda it: not it.screen.second)
        self.assertGreaterEqual(program.output.count("\x1b[H"), 20, "keys with several bytes are none")

    def test_ctrl_c_and_the_end_of_looks(self):
        program = self.live("watch")
        self.shows(program, "lm_head")
        program.type("\x03")
        self.assertEqual(program.wait(), 0)
        self.restored(program)
        program = self.live("watch", "--count", "2")
        self.assertEqual(program.wait(), 0)
        self.assertIn("lm_head", program.output)
        self.restored(program)

    def test_a_stop_gives_the_terminal_back_for_a_while(self):
        program = self.live("watch")
        self.shows(program, "lm_head")
        program.signal(signal.SIGTSTP)  # nothing here would let it go on, so the system does not stop it
        program.run_until(lambda it: it.output.count("\x1b[?1049h") == 2)
        self.assertRegex(program.output, r"\x1b\[\?25h\x1b\[\?1049l.*\x1b\[\?1049h\x1b\[\?25l")
        self.shows(program, "lm_head")
        program.type("q")
        self.assertEqual(program.wait(), 0)
        self.restored(program)

    def test_a_server_that_goes_is_said_and_comes_back_into_view(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        server, target = start(folder.name)
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        program = Program([LOSSCTL, "--server", target, "watch", "--interval", "0.1", "--timeout", "1"], 80, 24)
        self.addCleanup(program.close)
        self.shows(program, "no heads")
        server.kill()
        self.shows(program, "no answer: ")
        program.type("q")
        self.assertEqual(program.wait(), 0)
        self.restored(program)

    def test_a_dumb_terminal_gets_lines(self):
        program = self.live("watch", "--count", "2", columns=200, TERM="dumb")
        self.assertEqual(program.wait(), 0)
        self.assertNotIn("\x1b", program.output)
        self.assertEqual(program.output.count(" rows/s "), 2)

    def test_top_shows_clients_and_streams(self):
        load = subprocess.Popen([LOSSCTL, "--server", self.target, "bench", "lm_head", "--what", "dx", "--rows", "4096",
                                 "--seconds", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(load.wait)
        self.addCleanup(load.kill)
        for columns in (40, 80, 200):
            with self.subTest(columns=columns):
                program = self.live("top", columns=columns)
                self.shows(program, "CLIENT", "ROWS/S", "127.0.0.1:", "WAITS FOR", "q: leave")
                if columns != 80:  # there it depends on the numbers, which of the columns have room
                    self.assertEqual("ALL ROWS" in program.screen.text(), columns == 200)
                for key in "bswr":
                    program.type(key)
                program.type("q")
                self.assertEqual(program.wait(), 0)
                self.restored(program)
        # Peers and streams are counted one after the other, and a stream may end in between: one of some looks agrees.
        for _ in range(30):
            look = json.loads(self.run_lossctl("top", "-o", "json", "--count", "1", "--interval", "0.5"))
            busiest = look["peers"][0]
            self.assertGreater(busiest["received_bytes"], 0)
            streams = sum(stream["peer"] == busiest["peer"] for stream in look["streams"])
            if busiest["rows_per_second"] > 0 and busiest["open_streams"] == streams > 0:
                break
        else:
            self.fail(f"no look in which peers and streams agree; the last one is {look}")
        text = self.run_lossctl("top", "--count", "2", "--interval", "0.1")
        self.assertEqual(text.count("ROWS/S"), 2)
        self.assertNotIn("\x1b", text)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
