# SPDX-License-Identifier: Apache-2.0
"""A terminal that programs draw on: what they have on the screen, as text and with colours.

Understands what lossctl writes, and says so if there is more: SGR, cursor home, erase to the end of line and screen, the
second screen, the cursor's visibility. Not thread-safe.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time

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
