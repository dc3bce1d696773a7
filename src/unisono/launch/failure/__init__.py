"""Why a job failed: what ranks tell of their errors, which of them was the cause, and the report about it."""
