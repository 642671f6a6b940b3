"""How the processes of an engine start, talk and end."""
