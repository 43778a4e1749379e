"""Chats: messages of datasets, rendering by chat templates, and the trained turns."""
