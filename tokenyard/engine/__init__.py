"""The processes of an engine, one folder for each: API process, scheduler process, detokenizer."""
