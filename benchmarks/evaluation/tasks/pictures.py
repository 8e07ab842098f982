"""Pictures that the agent draws, looks at, changes and gets from people."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Final

from benchmarks.evaluation.checks import delivers, is_png, made_call, sends
from benchmarks.evaluation.task import Task, call, program, says, words

__all__ = ["TASKS"]

_TAKINGS: Final = "stall,takings\nnoodles,182\ngoldfish,240\napples,131\n"
_JAPANESE: Final = "屋台,売上\n焼きそば,182\n金魚すくい,240\nりんご飴,131\n"
_HEIGHTS: Final = "height\n" + "\n".join(str(150 + (7 * number) % 43) for number in range(60)) + "\n"
_SEND: Final = '{"chat_key": "${chat}", "file_path": "${path}"}'
_PATH: Final = r"(?P<path>/app/\w+/[\w.-]+\.png)"


def _flag() -> bytes:
    """Return a picture of 90 by 60 pixels: left half red, right half blue."""
    row = b"\0" + b"\xd0\x10\x10" * 45 + b"\x10\x10\xd0" * 45
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 90, 60, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * 60)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _has_size(width: int, height: int) -> Callable[[bytes], bool]:
    def check(content: bytes) -> bool:
        return is_png(content) and struct.unpack(">II", content[16:24]) == (width, height)

    return check


def _looks_like_a_plot(content: bytes) -> bool:
    return is_png(content) and min(struct.unpack(">II", content[16:24])) >= 200


TASKS: Final = (
    Task(
        name="chart_of_a_table",
        person=[says("Draw a bar chart of the takings and send it.", takings_csv=_TAKINGS)],
        model=[
            program("""
                import matplotlib.pyplot as plt
                import pandas as pd
                takings = pd.read_csv("/app/uploads/takings.csv")
                takings.plot.bar(x="stall", y="takings", title="Takings", rot=0)
                plt.tight_layout()
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/takings.csv", "most": 100}),
            call(
                "draw_chart",
                {
                    "path": "/app/uploads/takings.csv",
                    "sql": "SELECT stall, takings FROM t",
                    "title": "Takings",
                },
                after="stall,takings",
            ),
            call("send_msg_file", _SEND, after=_PATH),
            words("Here is the chart."),
        ],
        outcome=[delivers(r"\.png$", _looks_like_a_plot)],
    ),
    Task(
        name="japanese_chart",
        person=[
            says(
                "Draw a bar chart of this with a Japanese title, and name the best stall.", fair_csv=_JAPANESE
            )
        ],
        model=[
            program("""
                import matplotlib.pyplot as plt
                import pandas as pd
                fair = pd.read_csv("/app/uploads/fair.csv")
                best = fair.loc[fair["売上"].idxmax()]
                fair.plot.bar(x="屋台", y="売上", title="屋台の売上", rot=0)
                send_msg_text(_ck, f"The best stall is {best['屋台']} with {best['売上']}.")
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/fair.csv", "most": 100}),
            call(
                "draw_chart",
                {"path": "/app/uploads/fair.csv", "sql": "SELECT 屋台, 売上 FROM t", "title": "屋台の売上"},
                after="屋台,売上",
            ),
            call("send_msg_file", _SEND, after=_PATH),
            words("The best stall is 金魚すくい with 240."),
        ],
        outcome=[delivers(r"\.png$", _looks_like_a_plot), sends("金魚すくい")],
    ),
    Task(
        name="histogram",
        person=[says("Send me a histogram of the heights as heights.png.", heights_csv=_HEIGHTS)],
        model=[
            program("""
                import matplotlib.pyplot as plt
                import pandas as pd
                heights = pd.read_csv("/app/uploads/heights.csv")["height"]
                figure, axes = plt.subplots()
                axes.hist(heights, bins=8)
                axes.set_xlabel("height in cm")
                figure.savefig("/app/shared/heights.png")
                send_msg_file(_ck, "/app/shared/heights.png")
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/heights.csv", "most": 40}),
            call(
                "draw_chart",
                {
                    "path": "/app/uploads/heights.csv",
                    "sql": "SELECT height / 6 * 6 AS low, COUNT(*) AS number FROM t GROUP BY low",
                    "title": "Heights",
                },
                after="height",
            ),
            call("send_msg_file", _SEND, after=_PATH),
            words("Here is the histogram."),
        ],
        outcome=[delivers(r"\.png$", _looks_like_a_plot)],
    ),
    Task(
        name="look_at_a_drawing",
        person=[says("Draw a picture of 'autumn', look at it yourself, and tell me that you have seen it.")],
        model=[
            program('draw_picture("autumn")'),
            words(
                "I have seen it: a mirrored pattern of coloured squares for ${topic}.",
                after=r"agent_result method=\"[^\"]*draw_picture.*The picture for '(?P<topic>\w+)'",
                images=1,
            ),
        ],
        tools=[
            call("draw_picture", {"topic": "autumn"}),
            words("I have seen it: a mirrored pattern of coloured squares.", after="", images=1),
        ],
        outcome=[sends("seen|saw|see"), made_call("nekro.pictures.draw_picture")],
    ),
    Task(
        name="save_a_drawing",
        person=[says("Draw a picture of 'winter' with 96 pixels and send me the file.")],
        model=[program('send_msg_file(_ck, save_picture("winter", size=96))')],
        tools=[
            call("save_picture", {"topic": "winter", "size": 96}),
            call("send_msg_file", _SEND, after=_PATH),
            words("Here it is."),
        ],
        outcome=[delivers(r"\.png$", _has_size(96, 96))],
    ),
    Task(
        name="see_an_upload",
        person=[says("Which two colours has this picture, from left to right?", flag_png=_flag())],
        model=[words("Red on the left, blue on the right.", images=1)],
        tools=[words("Red on the left, blue on the right.", images=1)],
        outcome=[sends("(?s)red.*blue")],
    ),
    Task(
        name="resize_an_upload",
        person=[says("Make this picture 45 pixels wide and 30 high, and send it.", flag_png=_flag())],
        model=[
            program(
                """
                from PIL import Image
                with Image.open("/app/uploads/flag.png") as flag:
                    flag.resize((45, 30)).save("/app/shared/flag_small.png")
                send_msg_file(_ck, "/app/shared/flag_small.png")
                """,
                images=1,
            )
        ],
        tools=[
            call("resize_picture", {"path": "/app/uploads/flag.png", "width": 45, "height": 30}),
            call("send_msg_file", _SEND, after=_PATH),
            words("Here it is."),
        ],
        outcome=[delivers(r"\.png$", _has_size(45, 30))],
    ),
)
