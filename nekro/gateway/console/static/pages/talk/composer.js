/** Where a person writes: text, files by button, paste or drop. Ctrl-Enter or the button sends. */

import { api, newKey, path } from "../../lib/api.js";
import { el, fill } from "../../lib/dom.js";
import { bytes } from "../../lib/format.js";
import { icon } from "../../lib/icons.js";
import { button, say } from "../../lib/widgets.js";

const USER_KEY = "nekro.user";

export function composer(chatKey, { onPosted }) {
  let files = [];
  /** Kept over a failed try, so that a message that did arrive is not posted twice. */
  let key = newKey();
  const text = el("textarea", { rows: "2", placeholder: "Write to the agent", aria: { label: "Message" }, on: { keydown: (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); }
  }, input: grow, paste: (event) => take(event.clipboardData?.files) } });
  const picker = el("input.off-screen", { type: "file", multiple: true, tabindex: "-1", aria: { label: "Files" }, on: { change: () => { take(picker.files); picker.value = ""; } } });
  const chosen = el("ul.chosen", { role: "list", aria: { label: "Files to send" } });
  const user = el("input", { value: userName(), aria: { label: "Your name in the chat" }, title: "Your name in the chat", autocomplete: "off" });
  const send = el("button.button.primary", { type: "submit", aria: { keyshortcuts: "Control+Enter" } }, icon("send"), "Send");
  const form = el("form.composer", { on: { submit, dragover: (event) => event.preventDefault(), drop: (event) => { event.preventDefault(); take(event.dataTransfer?.files); } } },
    chosen, text, el("div.split", {},
      el("div.row", {}, picker, button("Attach", () => picker.click(), { image: "attach", kind: "quiet", label: "Attach files" }), el("span.composer-user", {}, "as ", user)),
      el("div.row", {}, el("span.quiet-text.composer-hint", {}, "Ctrl+Enter sends"), send)));
  return form;

  function take(list) {
    files = [...files, ...(list ?? [])];
    drawFiles();
  }

  function drawFiles() {
    fill(chosen, files.map((file, at) => el("li", {}, icon("file"), el("span", {}, file.name), el("span.quiet-text", {}, bytes(file.size)),
      button("", () => { files = files.filter((_, other) => other !== at); drawFiles(); }, { kind: "quiet small", image: "close", label: `Remove ${file.name}` }))));
  }

  function grow() {
    text.style.setProperty("height", "auto");
    text.style.setProperty("height", `${Math.min(text.scrollHeight + 2, 320)}px`);
  }

  async function submit(event) {
    event.preventDefault();
    if (!text.value.trim() && !files.length) return text.focus();
    send.disabled = true;
    try {
      const name = user.value.trim() || "operator";
      rememberUser(name);
      const where = `${path("/chats", chatKey)}/messages`;
      const fields = { text: text.value, user_id: name, user_name: name };
      const posted = files.length ? await api(where, { method: "POST", form: formOf(fields, files), key }) : await api(where, { method: "POST", body: fields, key });
      key = newKey();
      text.value = "";
      files = [];
      drawFiles();
      grow();
      onPosted(posted);
    } catch (error) {
      if (error.code === "idempotency_key_reused") key = newKey();
      say(error.message, "bad");
    } finally {
      send.disabled = false;
      text.focus();
    }
  }
}

function formOf(fields, files) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  for (const file of files) form.append("files", file, file.name);
  return form;
}

/** The name under which this browser writes. */
export function userName() {
  try {
    return localStorage.getItem(USER_KEY) ?? "operator";
  } catch {
    return "operator";
  }
}

function rememberUser(name) {
  try {
    localStorage.setItem(USER_KEY, name);
  } catch {
    // Storage is switched off: the name lasts as long as the page.
  }
}
