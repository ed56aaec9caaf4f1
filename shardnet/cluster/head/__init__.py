"""What the head of a ring does for its clients: rings for requests, answers, drafts."""
