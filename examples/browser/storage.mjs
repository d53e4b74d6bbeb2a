// What the page keeps: weights in two slots that take turns, so that one is whole whenever the tab is closed or the room
// ends in the middle of a save. One tab keeps, the first; it holds a lock for as long as it is there.

const [NAME, STORE, SLOTS] = ["opgrad-digits", "slots", ["first", "second"]];
const WAIT = 1500; // ms

function asked(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function opened() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE);
  return asked(request);
}

/** Whether this tab is the one that keeps. A page that is loaded again may have to wait until its old self is gone. */
export async function mayKeep() {
  if (!navigator.locks) return true;
  return new Promise((resolve) => {
    const held = () => new Promise(() => resolve(true));
    navigator.locks.request(NAME, { signal: AbortSignal.timeout(WAIT) }, held).catch(() => resolve(false));
  });
}

/** All that is kept, the newest first. */
async function kept() {
  const database = await opened();
  try {
    const store = database.transaction(STORE).objectStore(STORE);
    const records = await Promise.all(SLOTS.map((slot) => asked(store.get(slot))));
    const found = records.map((record, index) => ({ ...record, slot: SLOTS[index] })).filter(({ content }) => content);
    return found.sort((a, b) => b.number - a.number);
  } finally {
    database.close();
  }
}

/** Keep a record in the place of the older one; the promise is kept when it is on the disk, whole. */
export async function store(record) {
  const [newest] = await kept();
  const slot = SLOTS.find((each) => each !== newest?.slot);
  const database = await opened();
  try {
    const transaction = database.transaction(STORE, "readwrite", { durability: "strict" });
    transaction.objectStore(STORE).put({ ...record, number: (newest?.number ?? 0) + 1 }, slot);
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
  } finally {
    database.close();
  }
}

/** The newest record that `takes` takes, and what was wrong with newer ones. */
export async function recall(takes) {
  const problems = [];
  for (const record of await kept()) {
    try {
      await takes(record);
      return { record, problems };
    } catch (error) {
      problems.push(error.message);
    }
  }
  return { record: null, problems };
}

/** Forget all. */
export async function forget() {
  const database = await opened();
  try {
    await asked(database.transaction(STORE, "readwrite").objectStore(STORE).clear());
  } finally {
    database.close();
  }
}

/** Why something was not kept, for people. */
export function explained(error) {
  return error?.name === "QuotaExceededError"
    ? "The browser has no room to keep the weights. Nothing is lost: they are here until the tab is closed. Save them to a file."
    : `The weights could not be kept in the browser (${error?.message ?? error}). Save them to a file.`;
}
