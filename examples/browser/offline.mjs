// The page without a network: every file that it has asked for once is kept, and served where the server cannot be reached.

const NAME = "opgrad-page";
// What is asked for before this runs.
const PAGE = ["./", "index.html", "style.css", "main.mjs", "chart.mjs", "drawing.mjs", "storage.mjs"];

self.addEventListener("install", (event) => {
  self.skipWaiting();
  event.waitUntil(caches.open(NAME).then((cache) => cache.addAll(PAGE)));
});

self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method === "GET" && new URL(request.url).origin === location.origin) event.respondWith(answer(request));
});

/** The server's answer, which is kept; without the server the one that was kept last. */
async function answer(request) {
  const cache = await caches.open(NAME);
  try {
    const found = await fetch(request);
    if (found.ok) await cache.put(request, found.clone()).catch(() => {}); // the room may end
    return found;
  } catch (error) {
    const kept = await cache.match(request, { ignoreSearch: true });
    if (kept) return kept;
    throw error;
  }
}
