"""Know the model: load it, name it, describe its layers and its rotary tables."""
