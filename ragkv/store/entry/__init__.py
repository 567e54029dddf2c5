"""The bytes of one stored entry: header, format, lazy reading, codecs."""
