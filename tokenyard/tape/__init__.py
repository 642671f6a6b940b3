"""The tape: every input of a scheduler, recorded, replayed and anonymized."""
