"""The screen of `bagua-net top`, in Textual. The only module that imports it: everything else works without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from bagua.net.stats.sources import HostState, Source
from bagua.net.top.rows import COLUMNS, Row, details, host_lines, rows_of, sorted_rows

_SORT_KEYS = {column.key: index for index, column in enumerate(COLUMNS) if column.key}


class TopApp(App[None]):
    """Rows are keyed by process, peer, device and direction, so that the cursor stays where it is."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #hosts { height: auto; max-height: 6; }
    #table { height: 1fr; }
    #details { height: auto; max-height: 7; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("space", "pause", "Pause"),
        Binding("n", "sort('n')", "Sort: now"),
        Binding("r", "sort('r')", "rank"),
        Binding("s", "sort('s')", "stalled"),
        Binding("t", "sort('t')", "retransmits"),
        *(Binding(key, f"sort('{key}')", show=False) for key in _SORT_KEYS if key not in "nrst"),
        Binding("v", "reverse", "Reverse"),
    ]

    def __init__(self, sources: Sequence[Source], interval_s: float) -> None:
        super().__init__()
        self._sources = sources
        self._interval_s = interval_s
        self._paused = False
        self._sorted_by = COLUMNS[_SORT_KEYS["r"]]
        self._reverse = False
        self._columns = [one for one in COLUMNS if one.title != "host" or len(sources) > 1]
        self._states: list[HostState] = []
        self._rows: dict[str, Row] = {}
        # Held and not asked from the screen: messages and timers still come while the screen is taken down.
        self._hosts = Static(id="hosts", markup=False)
        self._table: DataTable[Text] = DataTable(id="table", cursor_type="row", zebra_stripes=True)
        self._hint = Static("More columns: scroll with the left and right keys.", id="hint", markup=False)
        self._details = Static(id="details", markup=False)

    def compose(self) -> ComposeResult:
        yield from (self._hosts, self._table, self._hint, self._details, Footer())

    def on_mount(self) -> None:
        self._table.focus()
        self._refresh()
        self.set_interval(min(self._interval_s, 1.0), self._refresh)

    def action_help_quit(self) -> None:
        """Ctrl-C. Textual's own would tell the user to press another key."""
        self.exit()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._show()

    def action_reverse(self) -> None:
        self._reverse = not self._reverse
        self._show()

    def action_sort(self, key: str) -> None:
        self._sorted_by = COLUMNS[_SORT_KEYS[key]]
        self._reverse = False
        self._show()

    def on_data_table_row_highlighted(self) -> None:
        self._show_details()

    def _refresh(self) -> None:
        if self._paused:
            return
        self._states = [source.state() for source in self._sources]
        self._show()

    def _show(self) -> None:
        lines = host_lines(self._states, time.monotonic(), self._interval_s)
        if self._paused:
            lines.insert(0, "PAUSED (space continues)")
        rows = sorted_rows(rows_of(self._states), self._sorted_by, reverse=self._reverse)
        if not rows and all(state.report is not None for state in self._states):
            lines.append("No process that uses Bagua-Net has an open connection yet.")
        self._hosts.update("\n".join(lines))
        table = self._table
        current = self._current_key()
        self._rows = {row.key: row for row in rows}
        # Columns as well: their widths fit what is in them, and the mark of the sorted one moves.
        table.clear(columns=True)
        for column in self._columns:
            mark = (" ^" if self._reverse else " v") if column is self._sorted_by else ""
            table.add_column(Text(column.title + mark, justify="left" if column.left else "right"))
        for key, row in self._rows.items():
            table.add_row(*(self._cell(row, number) for number in range(len(self._columns))), key=key)
        if current in self._rows:
            table.move_cursor(row=table.get_row_index(current))
        self._show_details()
        self.call_after_refresh(self._show_hint)

    def _show_hint(self) -> None:
        self._hint.display = self._table.max_scroll_x > 0

    def _cell(self, row: Row, number: int) -> Text:
        column = self._columns[number]
        style = ""
        if column.title == "stalled" and row.waits_for_ranks > 0.5:
            style = "bold red"
        elif column.title == "streams" and row.traffic.streams_lost:
            style = "yellow"
        return Text(column.text(row), style=style, justify="left" if column.left else "right", no_wrap=True)

    def _current_key(self) -> str:
        table = self._table
        if not table.is_valid_row_index(table.cursor_row):
            return ""
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)

    def _show_details(self) -> None:
        row = self._rows.get(self._current_key())
        self._details.update("\n".join(details(row)) if row is not None else "")
