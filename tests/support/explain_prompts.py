"""A prompt with all that could go wrong on a page, and a reader of pages."""

from html.parser import HTMLParser

from tiny import some_chunks

ODD = [
    "<script>document.title = 'taken'</script> & &amp; \"quoted\" 'too' \r\n\tindented,  twice",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 e\u0301 \u4e2d\u6587",
]
CHUNKS = [f"{odd}\n\n\n{text}" for odd, text in zip(["Plain", *ODD], some_chunks(3), strict=True)]
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say? <b>"}]


class Reader(HTMLParser):
    """Takes a page apart: every element with its attributes, and the tokens' characters."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tokens = self.words = ""
        self._inside = 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag == "div" and (self._inside or found.get("class") == "tokens"):
            self._inside += 1

    def handle_endtag(self, tag):
        if tag == "div" and self._inside:
            self._inside -= 1

    def handle_data(self, data):
        if self._inside:
            self.tokens += data
        else:
            self.words += data

    def marks(self, kind: str) -> int:
        return sum(
            tag == "i" and found.get("class", "").split()[0] == kind and "title" in found
            for tag, found in self.elements
        )
