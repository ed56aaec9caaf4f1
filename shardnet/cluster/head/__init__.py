"""What the head of a ring does: plans, requests, drafts."""
