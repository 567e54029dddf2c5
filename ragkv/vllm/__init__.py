"""vLLM decodes what ragkv repaired: the hand-over of a prompt's keys and values."""
