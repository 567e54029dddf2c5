"""What engines give: answers, streams of their text, and the interface of an engine itself."""
