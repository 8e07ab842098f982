/** Log in with a key, or with the link that “nekro up” prints: the gateway turns it into a cookie that scripts cannot read. */

import { el, fill } from "../lib/dom.js";
import { go, href, remember } from "../lib/router.js";
import { login } from "../lib/session.js";
import { field } from "../lib/widgets.js";

export const title = "Log in";

export function show(place, { query }) {
  const fault = el("p.fault", { role: "alert" });
  const key = el("input", { type: "password", autocomplete: "current-password", required: true, placeholder: "nk_…", name: "key" });
  const enter = el("button.button.primary", { type: "submit" }, "Log in");
  const form = el("form.card", { on: { submit: send } },
    el("h1", { tabindex: "-1" }, "Log in"),
    field("Key", key, { hint: "“nekro up” names the file that holds one; an operator creates others with “nekro keys create”." }),
    fault, enter);
  fill(place, el("div.login", {},
    el("p.brand", {}, el("img", { src: "/console/icon.svg", alt: "", width: "28", height: "28" }), "Nekro console"), form));
  key.focus();
  const code = query.get("code");
  if (code) {
    remember({ code: null }); // the address bar and the history keep no code
    enterWith(code);
  }

  function send(event) {
    event.preventDefault();
    enterWith(key.value.trim());
  }

  async function enterWith(secret) {
    fault.textContent = "";
    enter.disabled = true;
    try {
      await login(secret);
      document.dispatchEvent(new Event("nekro:session"));
      go(nextOf(query), { replace: true });
    } catch (error) {
      fault.textContent = error.message;
      enter.disabled = false;
      key.select();
    }
  }
}

/** The page that was asked for before; only addresses of this console. */
function nextOf(query) {
  const next = query.get("next") ?? "";
  return next.startsWith("/") && !next.startsWith("/login") ? `#${next}` : href("/chats");
}
