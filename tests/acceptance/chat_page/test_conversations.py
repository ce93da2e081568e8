"""What a reader says and hears: answers, edits, conversations, tabs, settings, files."""

from __future__ import annotations

import json
import re

import pytest

from chat_page_reader import CODE, HOSTILE, contents, ended, last, send, until

pytestmark = pytest.mark.acceptance


def test_an_answer_streams_and_has_its_figures(visit, fake):
    fake.answers["Hi"] = "word " * 60
    fake.chunk, fake.delay = 5, 0.02
    page = visit()
    send(page, "Hi", wait=False)
    until(page, "document.querySelector('.assistant .md')?.textContent.length > 20")
    assert len(last(page).inner_text()) < 290
    assert page.get_by_role("button", name="Stop").is_visible()
    ended(page)
    assert last(page).inner_text().split() == ["word"] * 60
    line = last(page, "footer > .meta").inner_text()
    assert re.fullmatch(
        r"60 tokens · [\d.]+ tok/s · first token [\d.]+ m?s · 96 of 120 cached · context 180 of 4,096", line
    )
    assert page.locator("#context-text").inner_text() == "180 of 4,096 tokens"
    body = fake.seen[0].body
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["model"] == "fake-1b" and body["messages"] == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_ends_the_request_and_keeps_the_text(way, visit, fake):
    fake.answers["Hi"] = "word " * 2_000
    fake.delay = 0.02
    page = visit()
    send(page, "Hi", wait=False)
    until(page, "document.querySelector('.assistant .md')?.textContent.length > 20")
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    fake.wait_for(lambda: fake.seen[0].aborted)
    ended(page)
    assert fake.seen[0].sent < 1_000
    assert last(page).inner_text().startswith("word word")
    assert last(page, ".notice").inner_text() == "Stopped."
    # And it goes on from there.
    fake.delay = 0
    fake.answers["continue"] = " and more"
    page.get_by_role("button", name="Continue the answer").click()
    ended(page)
    assert last(page).inner_text().endswith("and more")
    body = fake.seen[1].body
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert body["messages"][-1]["role"] == "assistant"


def test_answers_are_made_again_and_kept_beside_each_other(visit, fake):
    fake.answers["Hi"] = "first"
    page = visit()
    send(page, "Hi")
    fake.answers["Hi"] = "second"
    page.get_by_role("button", name="Answer again").click()
    until(page, "document.querySelector('.assistant .md').textContent.trim() === 'second'")
    ended(page)
    assert contents(fake) == ["Hi"]
    assert "2 of 2" in last(page, ".actions").inner_text()
    page.get_by_role("button", name="Previous answer").click()
    assert last(page).inner_text() == "first"
    send(page, "Next")
    assert contents(fake) == ["Hi", "first", "Next"]
    page.reload()
    page.get_by_role("button", name="Next answer").click()
    assert page.locator(".assistant").first.locator(".md").inner_text() == "second"


def test_my_message_is_edited_and_sent_again(visit, fake):
    page = visit()
    send(page, "one")
    send(page, "two")
    page.locator(".user").first.hover()
    page.get_by_role("button", name="Edit message").first.click()
    page.get_by_label("Edit your message").fill("uno")
    page.get_by_role("button", name="Save and send").click()
    ended(page)
    assert contents(fake) == ["uno"]
    assert page.locator(".message").count() == 2
    page.get_by_role("button", name="Undo").click()
    assert page.locator(".message").count() == 4
    assert page.locator(".user").all_inner_texts() == ["uno", "two"]


def test_an_answer_is_edited_and_the_model_is_told(visit, fake):
    page = visit()
    send(page, "one")
    page.get_by_role("button", name="Edit answer").click()
    page.get_by_label("Edit the answer").fill("**I** said this")
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_selector(".assistant strong")
    send(page, "two")
    assert contents(fake) == ["one", "**I** said this", "two"]


def test_a_reload_keeps_everything(visit, fake):
    fake.answers["code"] = f"```python\n{CODE}```"
    page = visit()
    send(page, "code")
    html = last(page).inner_html()
    line = last(page, "footer > .meta").inner_text()
    page.reload()
    page.wait_for_selector(".assistant pre span")
    assert last(page).inner_html() == html
    assert last(page, "footer > .meta").inner_text() == line
    send(page, "next")
    assert contents(fake) == ["code", fake.answers["code"], "next"]


def test_a_reload_in_the_middle_of_an_answer_keeps_its_text(visit, fake):
    fake.answers["Hi"] = "word " * 2_000
    fake.delay = 0.02
    page = visit()
    send(page, "Hi", wait=False)
    until(page, "document.querySelector('.assistant .md')?.textContent.length > 100")
    page.wait_for_timeout(1_000)
    page.reload()
    fake.wait_for(lambda: fake.seen[0].aborted)
    ended(page)
    assert len(last(page).inner_text()) > 90
    assert last(page, ".notice").inner_text() == "Stopped."
    assert page.get_by_role("button", name="Send").is_visible()


def test_several_conversations(visit, fake):
    fake.answers["slow"] = "tick " * 100
    fake.delay = 0.01
    page = visit()
    send(page, "slow", wait=False)
    page.wait_for_selector(".assistant .md:not(:empty)")
    # It is answered on while another one is open.
    page.get_by_role("button", name="New chat").click()
    send(page, "fast")
    assert page.locator("#conversations li").count() == 2
    fake.wait_for(lambda: fake.seen[0].done)
    page.get_by_role("link", name="slow").click()
    ended(page)
    assert last(page).inner_text().split() == ["tick"] * 100
    page.locator("#conversations li", has_text="fast").hover()
    page.get_by_role("button", name="Rename fast").click()
    page.get_by_label("Title").fill("quick")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="quick").click()
    assert page.locator("#title").inner_text() == "quick"
    assert page.locator(".user").all_inner_texts() == ["fast"]
    page.get_by_role("button", name="Delete quick").click()
    until(page, "document.querySelectorAll('#conversations li').length === 1")
    page.get_by_role("button", name="Undo").click()
    until(page, "document.querySelectorAll('#conversations li').length === 2")
    page.locator("#conversations li", has_text="slow").hover()
    page.get_by_role("button", name="Delete slow").click()
    until(page, "document.querySelectorAll('#conversations li').length === 1")
    page.reload()
    page.wait_for_selector("#conversations a")
    assert page.locator("#conversations a").all_inner_texts() == ["quick"]


def test_two_tabs_show_the_same(visit, fake):
    fake.answers["Hi"] = "word " * 150
    fake.delay = 0.02
    one = visit()
    send(one, "Hi", wait=False)
    one.wait_for_selector("#conversations a")
    two = visit(one.url.removeprefix(fake.url), beside=one)
    until(two, "document.querySelector('.assistant .md')?.textContent.length > 20")
    two.fill("#message", "x")
    assert two.get_by_role("button", name="Send").is_disabled()
    assert len(fake.seen) == 1
    ended(two)
    until(two, "document.querySelector('.assistant .md').textContent.trim().split(' ').length === 150")
    fake.delay = 0
    send(two, "more")
    until(one, "document.querySelectorAll('.message').length === 4")
    assert one.locator(".user").all_inner_texts() == ["Hi", "more"]
    two.locator("#conversations li").first.hover()
    two.get_by_role("button", name="Delete Hi").click()
    until(one, "document.querySelectorAll('#conversations li').length === 0")
    assert one.locator(".message").count() == 0


def test_a_model_without_a_chat_template_has_a_notebook(visit, fake):
    fake.has_chat_template = False
    fake.answers["def add(a, b):"] = "\n    return a + b\n"
    page = visit()
    page.wait_for_selector("#notebook-text:focus")
    assert page.get_by_role("button", name="New chat").count() == 0
    page.keyboard.type("def add(a, b):")
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelector('#notebook-text').value.endsWith('a + b\\n')")
    page.wait_for_selector("#notebook-text[aria-busy=false]")
    assert fake.seen[0].path == "text"
    assert fake.seen[0].body["prompt"] == "def add(a, b):" and fake.seen[0].body["stream"] is True
    assert "context 125 of 4,096" in page.locator("#notebook-stats").inner_text()
    page.get_by_role("button", name="Undo").click()
    assert page.input_value("#notebook-text") == "def add(a, b):"
    fake.answers["def add(a, b):"] = "\n    return b + a\n" * 500
    fake.delay = 0.01
    page.get_by_role("button", name="Continue").click()
    until(page, "document.querySelector('#notebook-text').value.includes('b + a')")
    page.keyboard.press("Escape")
    fake.wait_for(lambda: fake.seen[1].aborted)
    page.wait_for_selector("#notebook-text[aria-busy=false]")
    kept = page.input_value("#notebook-text")
    page.reload()
    until(page, "document.querySelector('#notebook-text').value.length > 20")
    assert page.input_value("#notebook-text") == kept
    fake.delay, fake.answers["def add(a, b):"] = 0, "!"
    page.get_by_role("button", name="Again").click()
    until(page, "document.querySelector('#notebook-text').value === 'def add(a, b):!'")


def test_settings_reach_the_request(visit, fake):
    page = visit()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Top-k").fill("7")
    page.get_by_label("Max tokens").fill("12")
    page.get_by_label("Stop at").fill("END\n\\n\\n")
    page.get_by_label("More request fields").fill('{"chat_template_kwargs": {"enable_thinking": false}}')
    page.get_by_label("Temperature").focus()
    page.keyboard.press("Escape")
    send(page, "Hi")
    body = fake.seen[0].body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_k"], body["max_tokens"]) == (0.3, 7, 12)
    assert body["stop"] == ["END", "\n\n"]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "top_p" not in body and "seed" not in body
    page.reload()
    page.wait_for_selector(".assistant")
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature").input_value() == "0.3"
    page.get_by_label("Temperature").fill("")
    # What is wrong is not taken over.
    page.get_by_label("More request fields").fill("{")
    page.get_by_label("Top-p").fill("3")
    page.get_by_label("Seed").focus()
    assert page.locator("[aria-invalid=true]").count() == 2
    page.get_by_role("button", name="Close settings").click()
    send(page, "Again")
    body = fake.seen[1].body
    assert "temperature" not in body and "top_p" not in body
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_conversations_are_exported_and_imported(visit, fake, tmp_path):
    page = visit()
    send(page, "keep **this**")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    exported = json.loads(file.read_text())
    assert [m["content"] for m in exported["conversations"][0]["messages"]] == [
        "keep **this**",
        "You said: keep **this**",
    ]
    other = visit()
    other.set_input_files("#import-file", file)
    other.wait_for_selector(".assistant strong")
    send(other, "go on")
    assert contents(fake) == ["keep **this**", "You said: keep **this**", "go on"]
    messages = [{"role": "system"}, 5, {"role": "user", "content": HOSTILE}]
    hostile = {"conversations": [7, {"title": {"a": 1}, "settings": {"seed": {}}, "messages": messages}]}
    file.write_text(json.dumps(hostile))
    other.set_input_files("#import-file", file)
    until(other, "document.querySelectorAll('#conversations li').length === 3")
    assert other.locator(".message").count() == 1
    assert other.evaluate("window.hit") is None
    file.write_text("not JSON")
    other.set_input_files("#import-file", file)
    other.wait_for_selector("#banner:not([hidden])")


def test_reasoning_is_folded_and_tool_calls_are_readable(visit, fake):
    pieces = ['{"city": "Ly', 'on", "days', '": 3}']
    fake.answers["weather"] = [
        *[{"reasoning_content": "I think. "}] * 5,
        {"content": "I ask."},
        {
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        *({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces),
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "time", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 10_000_000, "function": {"arguments": "x"}}]},
    ]
    page = visit()
    send(page, "weather")
    assert not page.locator(".reasoning .plain").is_visible()
    page.get_by_text(re.compile("Thought for")).click()
    assert page.locator(".reasoning .plain").inner_text().strip() == ("I think. " * 5).strip()
    assert page.locator(".tool-call strong").all_inner_texts() == ["weather", "time"]
    assert json.loads(page.locator(".tool-call code").first.inner_text()) == {"city": "Lyon", "days": 3}
    assert "\n" in page.locator(".tool-call code").first.inner_text()
    send(page, "and?")
    assert fake.seen[1].body["messages"][1] == {
        "role": "assistant",
        "content": "I ask.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Lyon", "days": 3}'},
            },
            {"id": "c2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }


def test_facts_that_the_server_leaves_out_are_left_out(visit, fake):
    fake.has_chat_template = fake.max_model_len = None
    fake.models = ["a", "b"]
    page = visit()
    page.get_by_label("Model", exact=True).select_option("b")
    send(page, "Hi")
    assert fake.seen[0].body["model"] == "b"
    assert last(page, "footer > .meta").inner_text().endswith("context 123")
    assert not page.locator("#context").is_visible()
