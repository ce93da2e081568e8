"""What tests of the chat page do in it, and texts that are hard to show."""

from __future__ import annotations

import time

CODE = (
    'class A:\n    def __init__(self, **kwargs):\n        self.html = "<b>&amp;</b>"  # `*_x_*`\n\n\tprint(f"{a}")\n'
)

TRICKY = f"""# Title

Some **bold** text, a [reference][1] and `__init__`.

1. one

2. two

   ```python
   def f(**kwargs): pass
   ```

10. ten

- a
- b
  > quoted

  | x | y |
  |--:|---|
  | 1 | `a` |

Setext
------

```python
{CODE}```
last ~~line~~ | no table

[1]: https://example.com/a
"""

HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2"><svg onload="window.hit = 3">

[click](javascript:window.hit=4) [data](data:text/html,<script>1</script>) ![p](http://evil.example/p.png)

```"><img src=x onerror=window.hit=5>
<script>window.hit = 6</script>
```

```html
<img src=x onerror="window.hit = 7">
```

| <img src=x onerror=window.hit=8> | `<script>window.hit = 9</script>` |
|:-:|--|
| <iframe srcdoc="<script>parent.hit=10</script>"></iframe> | <style>body{display:none}</style> |
"""


def send(page, text, wait=True):
    page.fill("#message", text)
    page.press("#message", "Enter")
    if wait:
        ended(page)


def ended(page, seconds=120):
    """Wait until the last answer is complete and formatted."""
    page.wait_for_selector("#messages > .assistant:last-child[aria-busy=false]", timeout=1000 * seconds)
    page.wait_for_selector("#messages > .assistant:last-child .pending", state="detached")


def until(page, expression, seconds=30):
    """Wait until an expression holds in the page, whose policy forbids Playwright's own way of waiting for one."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never came true: {expression}"
        page.wait_for_timeout(20)


def last(page, part=".md"):
    return page.locator(f"#messages > .assistant:last-child {part}")


def contents(fake, index=-1):
    return [message["content"] for message in fake.seen[index].body["messages"]]
