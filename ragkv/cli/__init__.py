"""The commands of ``ragkv``. Only this room talks to people; heavy imports wait for a command."""
