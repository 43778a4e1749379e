"""GSM8K as chats."""


def chat(row: dict) -> dict:
    """A row of GSM8K as a chat; chats stay."""
    if "messages" in row:
        return row
    question = {"role": "user", "content": row["question"]}
    return {"messages": [question, {"role": "assistant", "content": row["answer"]}]}
