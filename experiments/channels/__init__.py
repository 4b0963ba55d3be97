"""How fast experience travels between processes of one host."""
