"""The processes of the engine, their messages, and the loop of the scheduler process."""
