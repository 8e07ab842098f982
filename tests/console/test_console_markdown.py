"""Markdown of messages: what is understood, what no text can cause, and how much work a text can cause."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

MODULE: Final = (
    Path(__file__).parents[2] / "nekro" / "gateway" / "console" / "static" / "lib" / "markdown" / "blocks.js"
)
SCRIPT: Final = """
import { readFileSync } from "node:fs";
const { parse, lineOf } = await import(process.argv[1]);
const parsed = JSON.parse(readFileSync(0, "utf-8")).map((text) => parse(text));
console.log(JSON.stringify(parsed.map((one) => ({ ...one, line: lineOf(one.blocks) }))));
"""
#: All that a message can become; ``view.js`` has a line for each.
BLOCKS: Final = {"heading", "paragraph", "list", "quote", "rule", "code", "table"}
PARTS: Final = {"text", "code", "link", "em", "strong", "del"}
MOST_NODES: Final = 10_000
LONG: Final = 65_536


def parsed(texts: list[str]) -> list[dict[str, Any]]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js: apt-get install nodejs")
    command = [node, "--input-type=module", "-e", SCRIPT, MODULE.as_uri()]
    done = subprocess.run(command, input=json.dumps(texts).encode(), capture_output=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(found) == len(texts)
    return found


def drawn(block: Any) -> str:
    """Write a block or a part on one line, in the manner of HTML."""
    if isinstance(block, list):
        return "".join(map(drawn, block))
    match block["kind"]:
        case "text":
            return str(block["text"])
        case "paragraph":
            return f"<p>{drawn(block['parts'])}</p>"
        case "heading":
            return f"<h{block['level']}>{drawn(block['parts'])}</h{block['level']}>"
        case "list":
            start = "" if block["start"] is None else f" {block['start']}"
            return f"<list{start}>{''.join(f'<li>{drawn(item)}</li>' for item in block['items'])}</list>"
        case "quote":
            return f"<quote>{drawn(block['blocks'])}</quote>"
        case "rule":
            return "<hr>"
        case "code" if "pieces" in block:
            pieces = [f"{{{kind[4:]} {text}}}" if kind else text for text, kind in block["pieces"]]
            return f"<pre {block['language']}>{''.join(pieces)}</pre>"
        case "table":
            rows = [block["head"], *block["rows"]]
            return f"<table>{' / '.join(' | '.join(map(drawn, row)) for row in rows)}</table>"
        case "code":
            return f"<code>{block['text']}</code>"
        case "link":
            return f"<a {block['href']}>{drawn(block['parts'])}</a>"
        case kind:
            return f"<{kind}>{drawn(block['parts'])}</{kind}>"


def everything(tree: Any, depth: int = 0) -> list[tuple[dict[str, Any], int]]:
    """All objects of a tree that have a kind, with their depth."""
    if isinstance(tree, list):
        return [found for one in tree for found in everything(one, depth)]
    if not isinstance(tree, dict):
        return []
    inner = [found for value in tree.values() for found in everything(value, depth + 1)]
    return [(tree, depth), *inner]


UNDERSTOOD: Final = [
    ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
    ("# A\n###### B ##\n#hashtag", "<h1>A</h1><h6>B</h6><p>#hashtag</p>"),
    ("*a* **b** ***c*** ~~d~~ _e_ __f__",
     "<p><em>a</em> <strong>b</strong> <em><strong>c</strong></em> <del>d</del> <em>e</em>"
     " <strong>f</strong></p>"),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("snake_case_name 2 * 3 * 4 ~5~ **open", "<p>snake_case_name 2 * 3 * 4 ~5~ **open</p>"),
    ("**你好。**世界", "<p><strong>你好。</strong>世界</p>"),
    (r"\*a\* \`b\` C:\temp", r"<p>*a* `b` C:\temp</p>"),
    ("`a *b*` ``c ` d`` `open", "<p><code>a *b*</code> <code>c ` d</code> `open</p>"),
    ("- a\n- b\n  more\n    - deep\n* other",
     "<list><li><p>a</p></li><li><p>b\nmore</p><list><li><p>deep</p></li></list></li></list>"
     "<list><li><p>other</p></li></list>"),
    ("3. a\n4. b\n   - c\n\nIt was\n1986. Not a list",
     "<list 3><li><p>a</p></li><li><p>b</p><list><li><p>c</p></li></list></li></list>"
     "<p>It was\n1986. Not a list</p>"),
    ("1. a\n\n   ```sh\n   ls\n   ```\n2. b",
     "<list 1><li><p>a</p><pre sh>ls</pre></li><li><p>b</p></li></list>"),
    ("- [ ] open\n- [x] done", "<list><li><p>☐ open</p></li><li><p>☑ done</p></li></list>"),
    ("> a\n> - b\nc", "<quote><p>a</p><list><li><p>b</p></li></list></quote><p>c</p>"),
    ("a\n---\nb\n* * *", "<p>a</p><hr><p>b</p><hr>"),
    ("| A | B |\n|:--|--:|\n| 1 \\| 2 | `x` |\n| <br> |\nend",
     "<table>A | B / 1 | 2 | <code>x</code> / \n</table><p>end</p>"),
    ("a | b\n---", "<p>a | b</p><hr>"),
    ("```python\nif x: # y\n  s = 'z' + 1\n```",
     "<pre python>{keyword if} x: {comment # y}\n  s = {string 'z'} + {number 1}</pre>"),
    ('```json\n{"a": [true, -1.5e3]}\n```',
     '<pre json>{{string "a"}: [{keyword true}, {number -1.5e3}]}</pre>'),
    ("```bash\nfor x in 1; do echo \"$x\" # y\n```",
     "<pre bash>{keyword for} x {keyword in} {number 1};"
     ' {keyword do} {keyword echo} {string "$x"} {comment # y}</pre>'),
    ("~~~\n```\n*a*", "<pre >```\n*a*</pre>"),
    ("[a *b*](https://x.example/p_(q) \"title\")", "<p><a https://x.example/p_(q)>a <em>b</em></a></p>"),
    ("(see https://x.example/a_b.) <https://y.example> ahttp://z.example",
     "<p>(see <a https://x.example/a_b>https://x.example/a_b</a>.)"
     " <a https://y.example/>https://y.example</a> ahttp://z.example</p>"),
    ("[m](mailto:ada@x.example) **https://x.example**，好",
     "<p><a mailto:ada@x.example>m</a> <strong><a https://x.example/>https://x.example</a></strong>，好</p>"),
    ("![plot](https://x.example/p.png)", "<p><a https://x.example/p.png>Picture: plot</a></p>"),
    ("[![b](https://x.example/b)](https://y.example/)", "<p><a https://y.example/>Picture: b</a></p>"),
    ("[https://bank.example](https://other.example)",
     "<p><a https://other.example/>https://bank.example</a></p>"),
    ("[a [b](https://x.example) c](https://y.example)",
     "<p>[a <a https://x.example/>b</a> c](<a https://y.example/>https://y.example</a>)</p>"),
]  # fmt: skip

#: None of them becomes a link, an element or an address; the text is shown as it is.
LITERAL: Final = [
    "<script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "<svg onload=alert(1)><animate onbegin=alert(1)>",
    "<a href='javascript:alert(1)' onclick=alert(1)>x</a>",
    "<details open ontoggle=alert(1)>",
    "<style>*{display:none}</style>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](<javascript:alert(1)>)",
    "[x](java\tscript:alert(1))",
    "[x](java\nscript:alert(1))",
    "[x](\x01javascript:alert(1))",
    "[x](javascript\u200b:alert(1))",
    "[x](javascript&colon;alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](&#x6A&#x61&#x76&#x61script:alert(1))",
    "[x](%6aavascript:alert(1))",
    "[x](vbscript:msgbox(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](blob:x) [x](file:///etc/passwd) [x](about:blank)",
    "[x](//evil.example) [x](/console/session) [x](../x) [x](#/keys) [x](?a)",
    "[x](https:evil.example) [x](https:/evil.example)",
    "[x](https://) [x](https://[::) [x](mailto:)[x](http://a\u202e.example)",
    "<javascript:alert(1)> <data:text/html,x> <//evil.example>",
    "![x](javascript:alert(1)) ![x](data:image/svg+xml,<svg>) ![x](/api/v1/keys)",
    "[x]: javascript:alert(1)\n\n[x]",
    "&lt;script&gt; &amp; &#60;b&#62;",
    "{{constructor.constructor('alert(1)')()}}",
    'a" onmouseover="alert(1)',
]
#: Links, whatever their words say, that go where their address says.
CAREFUL: Final = [
    ("[x](https://a.example/\"onmouseover=\"alert(1))", "https://a.example/%22onmouseover=%22alert(1)"),
    ("[x](https://a.example/<script>)", "https://a.example/%3Cscript%3E"),
    ("[x](https://a.example/'onclick='x')", "https://a.example/'onclick='x'"),
    ("[x](HTTPS://A.example/?q=javascript:alert(1))", "https://a.example/?q=javascript:alert(1)"),
    ("[x](https://аpple.example/)", "https://xn--pple-43d.example/"),
]  # fmt: skip
CREDENTIALS: Final = ["[x](https://bank.example@evil.example)", "https://bank.example:1@evil.example/"]


def test_what_people_write_in_chats_is_understood() -> None:
    found = parsed([text for text, _ in UNDERSTOOD])
    assert [drawn(one["blocks"]) for one in found] == [wanted for _, wanted in UNDERSTOOD]


def test_a_message_on_one_line_has_words_without_marks_and_code() -> None:
    (one,) = parsed(["# A\n- **b** [c](https://x.example)\n\n|d|e|\n|-|-|\n|f|g|\n> h\n```\ncode\n```"])
    assert one["line"] == "A b c d e f g h"


def test_no_text_becomes_an_element_of_its_own_choice() -> None:
    attempts = [
        *LITERAL, *CREDENTIALS, *(text for text, _ in CAREFUL),
        *(f"{before}{text}{after}" for text in LITERAL
          for before, after in (("**", "**"), ("> - ", ""), ("| a |\n|-|\n|", "|"), ("[", "](https://x.example)"))),
    ]  # fmt: skip
    for text, one in zip(attempts, parsed(attempts), strict=True):
        kinds = {item["kind"] for item, _ in everything(one["blocks"])}
        assert kinds <= BLOCKS | PARTS, text
        hrefs = [item["href"] for item, _ in everything(one["blocks"]) if "href" in item]
        assert all(re.match(r"https?://[^/@\s]+/|mailto:[^\s]", href) for href in hrefs), (text, hrefs)


def test_hostile_markup_is_shown_as_it_was_written() -> None:
    for text, one in zip([*LITERAL, *CREDENTIALS], parsed([*LITERAL, *CREDENTIALS]), strict=True):
        assert not [item for item, _ in everything(one["blocks"]) if item["kind"] == "link"], text
        assert one["line"].split() == text.split()


def test_an_address_is_written_as_browsers_understand_it() -> None:
    found = parsed([text for text, _ in CAREFUL])
    hrefs = [[item["href"] for item, _ in everything(one["blocks"]) if "href" in item] for one in found]
    assert hrefs == [[wanted] for _, wanted in CAREFUL]


#: Repeated to 64 KiB: what makes naive parsers of Markdown slow, or trees deep and large.
PIECES: Final = [
    "> ", "- ", "1. ", "> - 1. ", "  - a\n", "- a\n\n", "> a\n\n", "`", "` `` ", "\\`", "[", "![",
    "[a](", "[a](b", "[a](http://b", "[a](http://b)", '[a](http://b "', "](", "(", "()", "*", "*a ",
    "_a ", "**a** ", "*a**b", "***a", "*a* ", "a*b_c~~d", "~~a~~", "|", "|a", "a|b\n-|-\n", "|\n|-\n",
    "|a|b|c|\n", "\n", " ", "\t", "x\n  y\n", "```\n", "~~~a\n", "#", "# a\n", "<br>", "<http://a",
    "http://a)", "h", "\\", "1 ",
]  # fmt: skip
#: What code and tables could be slow at.
FRAMED: Final = {
    "```python\n": ["1 ", "'", '"""', "\\", "rb'", "if ", "# ", "0"],
    "```sh\n": ["1 ", "'", '"', "\\", "a/", "if ", "# ", "-"],
    "```json\n": ["-1 ", '"', "\\", "true ", "/"],
    "|a|b|\n|-|-|\n": ["|", "|a|b|c|\n", "|*a* `b|\n", "\\|", "[a](b|"],
}
#: Of each character of a text: read once per level of quotes and lists, and by each rule.
MOST_STEPS: Final = 16
#: Six levels of quotes and lists, each with a block and an item, and two elements for each open mark.
MOST_DEPTH: Final = 50


def test_work_and_elements_grow_with_the_length_of_a_text_only() -> None:
    texts = [(piece * LONG)[:LONG] for piece in PIECES]
    texts += [frame + (piece * LONG)[:LONG] for frame, pieces in FRAMED.items() for piece in pieces]
    # Opened often, and closed.
    texts += [(piece * LONG)[: LONG // 2] + "x" + (")*]_`" * LONG)[: LONG // 2] for piece in PIECES]
    # The answers are large: the figures are enough.
    script = SCRIPT.replace("line: lineOf(one.blocks)", "blocks: null, depth: depthOf(one.blocks)")
    script += """
    function depthOf(tree) {
      let [deepest, level] = [0, [tree]];
      const within = (one) => Object.values(one).filter((item) => item !== null && typeof item === "object");
      for (; level.length; deepest += 1) level = level.flatMap(within);
      return deepest;
    }
    """
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js: apt-get install nodejs")
    done = subprocess.run(
        [node, "--input-type=module", "-e", script, MODULE.as_uri()],
        input=json.dumps(texts).encode(), capture_output=True, check=True,
    )  # fmt: skip
    for text, one in zip(texts, json.loads(done.stdout), strict=True):
        assert one["steps"] <= MOST_STEPS * len(text), (text[:40], one)
        assert one["nodes"] <= MOST_NODES + 100, (text[:40], one)
        assert one["depth"] <= 2 * MOST_DEPTH, (text[:40], one)


def test_the_rest_of_a_text_with_too_many_elements_is_plain() -> None:
    many, long = "*a* " * 12_000, "a " * LONG + "*end*"
    first, second = parsed([many, long])
    assert drawn(first["blocks"]).count("<em>") == MOST_NODES
    assert first["line"].endswith("*a* *a*")
    assert second["line"].endswith("*end*")
    assert sum(len(part["text"]) for block in second["blocks"] for part in block["parts"]) >= len(long) - 2
