/** Icons as drawings of 24 by 24; decorative, so screen readers skip them. */

import { svg } from "./dom.js";

const PATHS = {
  chats: "M4 5h16v11H9l-5 4z",
  turns: "M4 6h10M4 12h16M4 18h7",
  jobs: "M12 3a9 9 0 1 0 9 9M12 7v5l3.5 2",
  approvals: "M12 3l8 3v6c0 4.5-3.4 7.9-8 9-4.6-1.1-8-4.5-8-9V6zM9 12l2.2 2.2L15.5 10",
  timers: "M12 8v5l3 2M9 2h6M12 5a8 8 0 1 0 0 16 8 8 0 0 0 0-16z",
  plugins: "M9 3v4m6-4v4M6 7h12v5a6 6 0 0 1-12 0zm6 11v3",
  mcp: "M5 4h14v6H5zm0 10h14v6H5zM8 7h.01M8 17h.01",
  operations: "M3 12h4l3-7 4 14 3-7h4",
  charts: "M4 4v16h16M7 15l4-5 3 3 5-7",
  costs: "M5 20V11m7 9V4m7 16v-6",
  keys: "M14.5 9.5a4.5 4.5 0 1 0-4 4.47L12 15.5h2V18h2.5v2.5H20v-3l-5.8-5.8c.2-.7.3-1.4.3-2.2zM8.5 8.5h.01",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v3m0 14v3M2 12h3m14 0h3M5 5l2 2m10 10l2 2M19 5l-2 2M7 17l-2 2",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  system: "M3 4h18v12H3zm6 16h6m-3-4v4",
  file: "M6 3h8l5 5v13H6zm8 0v5h5",
  send: "M4 12l16-8-6 16-3-6.5z",
  attach: "M20 11.5l-8 8a5 5 0 0 1-7-7l8.5-8.5a3.3 3.3 0 0 1 4.7 4.7L9.7 17.2a1.7 1.7 0 0 1-2.4-2.4l7.2-7.2",
  follow: "M6 4v9a4 4 0 0 0 4 4h9m-4-4l4 4-4 4",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5l4.5 4.5L19 7.5",
  logout: "M10 4H5v16h5m5-4l4-4-4-4m4 4H10",
  refresh: "M20 5v5h-5M4 19v-5h5M5.5 9.5A7 7 0 0 1 19 9m0 6a7 7 0 0 1-13.5.5",
  external: "M14 4h6v6m0-6l-9 9M18 14v6H4V6h6",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zm5 12l4.5 4.5",
  retry: "M20 5v5h-5M19.5 10A8 8 0 1 0 20 14",
};

export function icon(name) {
  const drawing = svg("path", { d: PATHS[name] ?? "" });
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true", focusable: "false" }, drawing);
}
