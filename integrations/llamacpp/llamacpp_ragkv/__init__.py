"""llama.cpp decodes answers behind rows that ragkv repaired."""
