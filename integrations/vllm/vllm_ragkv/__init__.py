"""vLLM decodes prompts that ragkv repaired. vLLM's side (``connector``) does not import ragkv."""
