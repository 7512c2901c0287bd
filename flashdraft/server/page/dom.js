// Small things that every part of the page makes: elements, buttons, copied text, errors in words.

export function element(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// A button that calls `act` with itself.
export function button(label, act, className = "") {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", () => act(made));
  return made;
}

// Copies text; where the clipboard is closed to pages (plain http on a network), the old way.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export async function copyFrom(pressed, text) {
  pressed.dataset.label ??= pressed.textContent; // pressed twice, it says something else already
  pressed.textContent = (await copyText(text)) ? "Copied" : "Not copied";
  setTimeout(() => (pressed.textContent = pressed.dataset.label), 1500);
}

// Hands a text to the browser as a file to keep.
export function saveFile(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a");
  link.href = address;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

// An error in words, with what can be done about it. `retry` may be null.
export function drawError(place, error, retry) {
  const note = element("div", "error", element("p", "", error.message));
  note.setAttribute("role", "alert");
  if (error.detail) note.append(element("p", "detail", error.detail));
  if (retry) {
    const again = button("Try again", retry);
    note.append(again);
    if (error.retryAfter) countDown(again, error.retryAfter);
  }
  place.replaceChildren(note);
}

// The server said when to come back: count the seconds down, the button works all the while.
function countDown(again, seconds) {
  const tick = () => {
    if (!again.isConnected && seconds < 0) return;
    again.textContent = seconds > 0 ? `Try again (in ${seconds} s)` : "Try again";
    seconds -= 1;
    if (seconds >= 0) setTimeout(tick, 1000);
  };
  tick();
}
