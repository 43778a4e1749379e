"""The Modelfile for Ollama has the prompts of the chat template, or no template."""

import json
import shutil
import subprocess

import jinja2
import pytest
from lmx.convert.gguf.modelfile import CONVERSATIONS, ROLES, modelfile

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As in Qwen2.5: a system message of its own.
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}" + CHATML
)
# As in Llama 3: BOS, headers, no newline after a message.
HEADERS = (
    "{% for m in messages %}{{ '<s>' if loop.first }}<h>{{ m.role }}</h>\n\n"
    "{{ m.content | trim }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<h>assistant</h>\n\n{% endif %}"
)
# As in Zephyr: a role is a line.
LINES = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CONVERTED = {
    "chatml": CHATML,
    "default system": DEFAULT_SYSTEM,
    "headers": HEADERS,
    "lines": LINES,
}
NOT_CONVERTED = {
    # As in Mistral: the system message is a part of the first question.
    "merged system": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] "
        "{{ messages[0].content + '\n' if messages[0].role == 'system' }}"
        "{{ m.content }} [/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>"
        "{% endif %}{% endfor %}"
    ),
    # As in Gemma: no system message.
    "no system": "{{ raise_exception('no') if messages[0].role == 'system' }}" + CHATML,
    "count": "{{ messages | length }} messages" + CHATML,
    "last answer only": (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.index > 4 %}"
        "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    ),
    "date": "{{ strftime_now('%d') }}" + CHATML,
    "braces": CHATML.replace("<|im_start|>", "{{ '{{' }}"),
}
GO = """\
package main

import ("encoding/json"; "os"; "text/template")

type Message struct { Role, Content string }
type Values struct { System string; Messages []Message }

func main() {
    text, _ := os.ReadFile("template")
    data, _ := os.ReadFile("conversations.json")
    var every []Values
    if err := json.Unmarshal(data, &every); err != nil { panic(err) }
    parsed := template.Must(template.New("").Parse(string(text)))
    for _, values := range every {
        if err := parsed.Execute(os.Stdout, values); err != nil { panic(err) }
        os.Stdout.WriteString("\\x00")
    }
}
"""


class TemplateTokenizer:
    """A tokenizer with a chat template and two end tokens."""

    eos_token_ids = frozenset({1, 0})
    bos_token, bos_token_id = "<s>", 7

    def __init__(self, chat_template: str | None, *, adds_bos: bool = False):
        self.chat_template = chat_template
        self.adds_bos = adds_bos
        self.has_chat_template = chat_template is not None

    def encode(self, text):
        return [7, 3] if self.adds_bos else [3]

    def convert_ids_to_tokens(self, ids):
        return [("<|im_end|>", "<eot>")[index] for index in ids]

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize

        def raise_exception(message):
            raise jinja2.TemplateError(message)

        return jinja2.Template(self.chat_template, keep_trailing_newline=True).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            raise_exception=raise_exception,
            strftime_now=lambda form: "1",
        )


def go_template(text: str) -> str:
    """The template in a Modelfile."""
    [template] = text.split('"""')[1:-1]
    return template


def test_modelfile_of_chatml():
    assert modelfile("a.gguf", TemplateTokenizer(CHATML)) == (
        'FROM ./a.gguf\nTEMPLATE """{{ if not .System }}{{ end }}'
        "{{ range $i, $_ := .Messages }}"
        "{{ $last := eq (len (slice $.Messages $i)) 1 }}"
        '{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        "{{ if $last }}<|im_start|>assistant\n{{ end }}"
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}'
        "{{ if not $last }}<|im_end|>\n{{ end }}"
        '{{ end }}{{ end }}"""\n'
        'PARAMETER stop "<|im_end|>"\nPARAMETER stop "<eot>"\n'
    )


def test_modelfile_without_chat_template_has_no_template():
    assert modelfile("a.gguf", TemplateTokenizer(None)) == (
        'FROM ./a.gguf\nPARAMETER stop "<|im_end|>"\nPARAMETER stop "<eot>"\n'
    )


@pytest.mark.parametrize("chat_template", NOT_CONVERTED.values(), ids=NOT_CONVERTED)
def test_template_that_go_cannot_render_is_not_written(chat_template):
    text = modelfile("a.gguf", TemplateTokenizer(chat_template))
    assert "TEMPLATE" not in text
    assert "# The chat template in the GGUF file has no equivalent here.\n" in text
    assert 'PARAMETER stop "<eot>"' in text


def test_bos_is_written_unless_the_file_adds_it():
    for adds_bos in (True, False):
        tokenizer = TemplateTokenizer(HEADERS, adds_bos=adds_bos)
        has_bos = "<s>" in go_template(modelfile("a.gguf", tokenizer))
        assert has_bos is not adds_bos


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("go"), reason="no Go, whose templates Ollama uses")
@pytest.mark.parametrize("chat_template", CONVERTED.values(), ids=CONVERTED)
def test_go_renders_the_prompts_of_the_chat_template(chat_template, tmp_path):
    tokenizer = TemplateTokenizer(chat_template)
    chats = [[(ROLES[text], text) for text in texts] for texts in CONVERSATIONS]
    values = [
        {
            # As Ollama collects them.
            "System": "".join(text for role, text in chat if role == "system"),
            "Messages": [{"Role": role, "Content": text} for role, text in chat],
        }
        for chat in chats
    ]
    text = go_template(modelfile("a.gguf", tokenizer))
    (tmp_path / "template").write_text(text)
    (tmp_path / "conversations.json").write_text(json.dumps(values))
    (tmp_path / "main.go").write_text(GO)
    done = subprocess.run(
        ["go", "run", "main.go"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected = [
        tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in chat],
            tokenize=False,
            add_generation_prompt=True,
        )
        for chat in chats
    ]
    assert done.stdout.split("\0")[:-1] == expected
