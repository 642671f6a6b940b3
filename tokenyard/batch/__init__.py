"""Files and batches as OpenAI's API has them: what is kept on disk, and what answers the lines of a batch."""
