// Fetch for our own JSON endpoints. Errors become one class that can be shown as a sentence.

const CSRF = document.querySelector('meta[name="csrf-token"]')?.content ?? "";

/** Refusal or failure of an endpoint: `type` is machine-readable, `message` a sentence. */
export class ApiError extends Error {
  constructor(status, { type = "", message = "", retry_after_s: retryAfter = 0 } = {}) {
    super(message || `The server answered ${status}.`);
    this.status = status;
    this.type = type;
    this.retryAfterS = retryAfter;
  }
}

/** The JSON answer (null for 204); raises ApiError. `body` is sent as JSON. */
export async function request(method, url, body) {
  const headers = { Accept: "application/json", "X-CSRFToken": CSRF };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(url, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new ApiError(0, { type: "unreachable", message: "The console did not answer. Is the server running?" });
  }
  if (response.status === 204) return null;
  const isJson = response.headers.get("Content-Type")?.includes("json");
  const answer = isJson ? await response.json() : {};
  if (!response.ok) throw new ApiError(response.status, answer.error);
  return answer;
}

export const get = (url) => request("GET", url);
