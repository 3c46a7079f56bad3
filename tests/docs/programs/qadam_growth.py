# ranks: 1


from pathlib import Path

rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in Path(__file__).read_text().splitlines()]
(place,) = (number for number, row in enumerate(rows) if row[:1] == ["steps grow by up to"])
steps, growth = rows[place - 2], rows[place]
assert steps[0] == "`warmup_steps`" and len(steps) == len(growth) == 6
for count, factor in zip(steps[1:], growth[1:]):
    assert f"{(1 - 0.999 ** int(count)) ** -0.5:.2f}" == factor, (count, factor)
