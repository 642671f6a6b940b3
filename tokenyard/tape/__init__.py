"""The tape: everything that went into a scheduler, recorded, replayed and anonymized."""
