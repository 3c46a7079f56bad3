# ranks: 1
"""The table of steps that grow after the warm-up has the values of the formula."""

from support.page_programs import REPOSITORY

page = REPOSITORY / "docs" / "reference" / "algorithms" / "qadam.md"
rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()]
(row,) = (number for number, row in enumerate(rows) if row[:1] == ["steps grow by up to"])
assert rows[row - 2][0] == "`warmup_steps`"
for count, factor in zip(rows[row - 2][1:], rows[row][1:], strict=True):
    assert f"{(1 - 0.999 ** int(count)) ** -0.5:.2f}" == factor, (count, factor)
