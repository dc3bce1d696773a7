"""What a terminal would show, and what nested progress bars write."""


class Terminal:
    """As much of a terminal as progress bars and the launcher need."""

    def __init__(self):
        self.rows, self.row = [""], 0

    def write(self, data):
        text = data.decode().replace("\x1b[2K", "\0").replace("\x1b[1A", "\1").replace("\x1b[A", "\1")
        column = len(self.rows[self.row])
        for sign in text:
            if sign == "\n":
                self.row, column = self.row + 1, 0
                if self.row == len(self.rows):
                    self.rows.append("")
            elif sign == "\r":
                column = 0
            elif sign == "\0":
                self.rows[self.row] = ""
            elif sign == "\1":
                assert self.row > 0
                self.row -= 1
            else:
                self.rows[self.row] = (
                    self.rows[self.row][:column].ljust(column) + sign + self.rows[self.row][column + 1 :]
                )
                column += 1
        return self

    @property
    def text(self):
        return [row.rstrip() for row in self.rows if row.strip()]


def nested_bars(epochs, batches):
    """What two bars, one below the other, write to a pipe, with a line printed above them after each epoch."""
    yield b"\repoch 0/%d" % epochs
    for epoch in range(epochs):
        for batch in range(batches + 1):
            yield from (b"\n", b"\rbatch %d/%d" % (batch, batches), b"\x1b[A")
        yield from (b"\n", b"\r           ", b"\x1b[A", b"\r           \r", b"loss %d\n" % epoch)
        yield b"\repoch %d/%d" % (epoch + 1, epochs)
    yield b"\n"
