"""Jobs on several hosts: where agents meet, what each tells the others, and who is lost. Start at `host_settings`."""
